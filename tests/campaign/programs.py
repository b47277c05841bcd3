"""Random programs whose traffic is known, since it is what was drawn."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, NamedSharding

from tests.workers import P

Part = Any  # a Send, a Loop, a Branch, or a list of them


class Send(NamedTuple):
    """One collective of each device's ``count`` elements."""

    kind: str
    axis: str
    count: int
    dtype: str
    salt: int  # else two of them may become one


class Loop(NamedTuple):
    turns: int | None  # None: until a condition holds
    body: Part


class Branch(NamedTuple):
    ways: tuple[Part, ...]


class Sent(NamedTuple):
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


def programs(
    axes: tuple[str, ...],
    kinds: tuple[str, ...] = tuple(XLA_KIND),
    dtypes: tuple[str, ...] = tuple(XLA_DTYPE),
) -> st.SearchStrategy[list[Part]]:
    """Up to three levels of loops and branches."""
    sends = st.builds(
        Send,
        kind=st.sampled_from(kinds),
        axis=st.sampled_from(axes),
        count=st.integers(1, 300).map(lambda k: 8 * k),  # so that it can be scattered
        dtype=st.sampled_from(dtypes),
        salt=st.integers(1, 2**20),
    )

    def around(part: st.SearchStrategy[Part]) -> st.SearchStrategy[Part]:
        several = st.lists(part, min_size=1, max_size=3)
        turns = st.one_of(st.integers(0, 5), st.integers(1, 5), st.none())
        ways = st.lists(several, min_size=2, max_size=3).map(tuple)
        return st.one_of(st.builds(Loop, turns, several), st.builds(Branch, ways))

    return st.lists(st.recursive(sends, around, max_leaves=6), min_size=1, max_size=4)


def totals(
    part: Part, times: int | None = 1, conditional: bool = False
) -> collections.Counter[Sent]:
    """The elements of all that is sent; where turns are not known, of one turn."""
    match part:
        case Send(kind, axis, count, dtype, _):
            known = XLA_KIND[kind], XLA_DTYPE[dtype]
            sent = Sent(*known, axis, conditional, times is not None)
            return collections.Counter({sent: count * (1 if times is None else times)})
        case Loop(turns, body):
            part = body
            if turns is None or times is None:
                times = 0 if 0 in (turns, times) else None
            else:
                times *= turns
        case Branch(ways):
            part, conditional = ways, True
    found = (totals(one, times, conditional) for one in part)
    return sum(found, collections.Counter())  # which leaves out what is 0


def lowered(part: Part, mesh: Mesh) -> jax.stages.Lowered:
    """A program of all devices of the mesh that does what ``part`` says."""
    split = P(mesh.axis_names)
    run = jax.shard_map(
        lambda x: _run(part, x, dict(mesh.shape)),
        mesh=mesh, in_specs=split, out_specs=split, check_vma=False,
    )  # fmt: skip
    there = NamedSharding(mesh, split)
    x = jax.ShapeDtypeStruct((mesh.size,), jnp.float32, sharding=there)
    return jax.jit(run).lower(x)


def _run(part: Part, x: jax.Array, sizes: dict[str, int]) -> jax.Array:
    """Every part depends on what the one before it left in ``x``, a single number."""
    match part:
        case Loop(None, body):
            return lax.while_loop(
                lambda x: x[0] < 1e6, lambda x: _run(body, x, sizes), x
            )
        case Loop(turns, body):
            return lax.scan(lambda x, _: (_run(body, x, sizes), None), x, length=turns)[
                0
            ]
        case Branch(ways):
            runs = [lambda x, way=way: _run(way, x, sizes) for way in ways]
            return lax.switch(jnp.abs(x[0]).astype(jnp.int32) % len(runs), runs, x)
        case Send():
            return _communicate(part, x, sizes[part.axis])
    for one in part:
        x = _run(one, x, sizes)
    return x


def _communicate(send: Send, x: jax.Array, size: int) -> jax.Array:
    own = x[0] * send.salt + jnp.arange(send.count, dtype=jnp.float32)
    own = (own * own).astype(send.dtype)
    around, axis = [(i, (i + 1) % size) for i in range(size)], send.axis
    found = {
        "psum": lambda y: lax.psum(y, axis),
        "psum_scatter": lambda y: lax.psum_scatter(y, axis, tiled=True),
        "all_gather": lambda y: lax.all_gather(y, axis),
        "all_to_all": lambda y: lax.all_to_all(y.reshape(size, -1), axis, 0, 0),
        "ppermute": lambda y: lax.ppermute(y, axis, around),
    }[send.kind](own)
    # Not linear: XLA may not add before it communicates what it would add after.
    return x + jnp.sum(jnp.maximum(found.astype(jnp.float32), 1.0))
