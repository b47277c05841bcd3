"""Memory traffic of a program: parts as parts, updates in place, the least branch."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.chips.traffic import traffic

PART = """HloModule m

%sliced (a: f32[1000], b: f32[10]) -> f32[10] {
  %a = f32[1000]{0} parameter(0)
  %b = f32[10]{0} parameter(1)
  %s = f32[10]{0} slice(%a), slice={[0:10]}
  ROOT %r = f32[10]{0} add(%s, %b)
}

ENTRY %main (x: f32[1000], y: f32[10]) -> f32[10] {
  %x = f32[1000]{0} parameter(0)
  %y = f32[10]{0} parameter(1)
  ROOT %f = f32[10]{0} fusion(%x, %y), kind=kLoop, calls=%sliced
}
"""
IN_PLACE = """HloModule m

%updated (a: f32[1000], b: f32[10], i: s32[]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  %b = f32[10]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %r = f32[1000]{0} dynamic-update-slice(%a, %b, %i)
}

ENTRY %main (x: f32[1000], y: f32[10], i: s32[]) -> f32[1000] {
  %x = f32[1000]{0} parameter(0)
  %y = f32[10]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[1000]{0} fusion(%x, %y, %i), kind=kLoop, calls=%updated
}
"""
BRANCHES = """HloModule m

%due (p: (f32[1000])) -> (f32[1000]) {
  %p = (f32[1000]{0}) parameter(0)
  %x = f32[1000]{0} get-tuple-element(%p), index=0
  %n = f32[1000]{0} negate(%x)
  ROOT %t = (f32[1000]{0}) tuple(%n)
}

%not_due (p: (f32[1000])) -> (f32[1000]) {
  ROOT %p = (f32[1000]{0}) parameter(0)
}

ENTRY %main (c: pred[], x: f32[1000]) -> (f32[1000]) {
  %c = pred[] parameter(0)
  %x = f32[1000]{0} parameter(1)
  %t = (f32[1000]{0}) tuple(%x)
  ROOT %r = (f32[1000]{0}) conditional(%c, %t, %t), branch_computations={%due, %not_due}
}
"""
LOOP = """HloModule m

%body (p: (f32[10])) -> (f32[10]) {
  %p = (f32[10]{0}) parameter(0)
  %x = f32[10]{0} get-tuple-element(%p), index=0
  %n = f32[10]{0} negate(%x)
  ROOT %t = (f32[10]{0}) tuple(%n)
}

%more (p: (f32[10])) -> pred[] {
  %p = (f32[10]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x: f32[10]) -> (f32[10]) {
  %x = f32[10]{0} parameter(0)
  %t = (f32[10]{0}) tuple(%x)
  ROOT %r = (f32[10]{0}) while(%t), condition=%more, body=%body, \
backend_config={"known_trip_count":{"n":"7"}}
}
"""


@pytest.mark.parametrize(
    ("text", "elements", "kernels", "conditionals"),
    [
        (PART, 30, 1, 0),  # of 1000 elements ten are read
        (IN_PLACE, 21, 1, 0),  # ten read and written, and the place
        (BRANCHES, 0, 0, 1),
        (LOOP, 7 * 20, 7, 0),
    ],
)
def test_traffic_is_what_is_needed(
    text: str, elements: int, kernels: int, conditionals: int
) -> None:
    assert traffic(text) == (4 * elements, kernels, conditionals)


def test_of_a_compiled_program_each_array_is_passed_once() -> None:
    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * 2 + y, y - 1

    shape = jax.ShapeDtypeStruct((4096,), jnp.float32)
    compiled = jax.jit(step).lower(shape, shape).compile()
    found = traffic(str(compiled.as_text()))
    assert 4 * 4096 * 4 <= found.bytes <= 4 * 4096 * 5  # one kernel, or two
