"""Random programs whose traffic is known, since it is what was drawn."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax.sharding import Mesh

from tests.workers import P

Part = Any  # a Send, a Loop, a Branch, or a list of them


@dataclasses.dataclass(frozen=True)
class Send:
    """One collective of each device's ``count`` elements."""

    kind: str
    axis: str
    count: int
    dtype: str
    salt: int  # else two of them may become one


@dataclasses.dataclass(frozen=True)
class Loop:
    turns: int | None  # None: until a condition holds
    body: Part


@dataclasses.dataclass(frozen=True)
class Branch:
    ways: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Sent:
    """What is expected of some collectives of a program."""

    kind: str
    dtype: str
    axis: str
    conditional: bool
    known: bool


XLA_KIND = {
    "psum": "all-reduce",
    "psum_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
XLA_DTYPE = {"float32": "f32", "int32": "s32", "uint8": "u8"}


def sends(
    axes: tuple[str, ...], kinds: tuple[str, ...], dtypes: tuple[str, ...]
) -> st.SearchStrategy[Send]:
    """Counts are multiples of 8, so that they can be scattered."""
    return st.builds(
        Send,
        kind=st.sampled_from(kinds),
        axis=st.sampled_from(axes),
        count=st.integers(1, 300).map(lambda k: 8 * k),
        dtype=st.sampled_from(dtypes),
        salt=st.integers(1, 2**20),
    )


def programs(
    axes: tuple[str, ...],
    kinds: tuple[str, ...] = tuple(XLA_KIND),
    dtypes: tuple[str, ...] = tuple(XLA_DTYPE),
) -> st.SearchStrategy[list[Part]]:
    """Up to three levels of loops and branches."""

    def around(part: st.SearchStrategy[Part]) -> st.SearchStrategy[Part]:
        several = st.lists(part, min_size=1, max_size=3)
        turns = st.one_of(st.integers(0, 5), st.integers(1, 5), st.none())
        ways = st.lists(several, min_size=2, max_size=3).map(tuple)
        return st.one_of(st.builds(Loop, turns, several), st.builds(Branch, ways))

    part = st.recursive(sends(axes, kinds, dtypes), around, max_leaves=6)
    return st.lists(part, min_size=1, max_size=4)


def expected(
    part: Part, times: int | None = 1, conditional: bool = False
) -> Iterator[tuple[Sent, int]]:
    """What is sent, and how many elements; where that is not known, of one turn."""
    if isinstance(part, list):
        for one in part:
            yield from expected(one, times, conditional)
    elif isinstance(part, Loop):
        inside = None if part.turns is None or times is None else times * part.turns
        if part.turns != 0 and times != 0:
            yield from expected(part.body, inside, conditional)
    elif isinstance(part, Branch):
        for way in part.ways:
            yield from expected(way, times, True)
    else:
        sent = Sent(
            XLA_KIND[part.kind], XLA_DTYPE[part.dtype], part.axis, conditional,
            times is not None,
        )  # fmt: skip
        yield sent, part.count * (1 if times is None else times)


def totals(part: Part) -> dict[Sent, int]:
    found: collections.Counter[Sent] = collections.Counter()
    for sent, elements in expected(part):
        found[sent] += elements
    return dict(found)


def lowered(part: Part, mesh: Mesh) -> jax.stages.Lowered:
    """A program of all devices of the mesh that does what ``part`` says."""
    run = jax.shard_map(
        lambda x: _run(part, x, dict(mesh.shape)),
        mesh=mesh,
        in_specs=P(mesh.axis_names),
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    there = jax.sharding.NamedSharding(mesh, P(mesh.axis_names))
    x = jax.ShapeDtypeStruct((mesh.size,), jnp.float32, sharding=there)
    return jax.jit(run).lower(x)


def _run(part: Part, x: jax.Array, sizes: dict[str, int]) -> jax.Array:
    """Every part depends on what the one before it left in ``x``, a single number."""
    if isinstance(part, list):
        for one in part:
            x = _run(one, x, sizes)
        return x
    if isinstance(part, Loop):
        if part.turns is None:
            return jax.lax.while_loop(
                lambda x: x[0] < 1e6, lambda x: _run(part.body, x, sizes), x
            )
        once = lambda x, _: (_run(part.body, x, sizes), None)  # noqa: E731
        return jax.lax.scan(once, x, length=part.turns)[0]
    if isinstance(part, Branch):
        ways = [lambda x, way=way: _run(way, x, sizes) for way in part.ways]
        which = jnp.abs(x[0]).astype(jnp.int32) % len(ways)
        return jax.lax.switch(which, ways, x)
    return _communicate(part, x, sizes[part.axis])


def _communicate(send: Send, x: jax.Array, size: int) -> jax.Array:
    own = x[0] * send.salt + jnp.arange(send.count, dtype=jnp.float32)
    own = (own * own).astype(send.dtype)
    around = [(i, (i + 1) % size) for i in range(size)]
    found = {
        "psum": lambda y: jax.lax.psum(y, send.axis),
        "psum_scatter": lambda y: jax.lax.psum_scatter(y, send.axis, tiled=True),
        "all_gather": lambda y: jax.lax.all_gather(y, send.axis),
        "all_to_all": lambda y: jax.lax.all_to_all(
            y.reshape(size, -1), send.axis, 0, 0
        ),
        "ppermute": lambda y: jax.lax.ppermute(y, send.axis, around),
    }[send.kind](own)
    # Not linear: XLA may not add before it communicates what it would add behind.
    return x + jnp.sum(jnp.maximum(found.astype(jnp.float32), 1.0))
