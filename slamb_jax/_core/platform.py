"""Barriers and platform branches, each with its reason.

See also ``platform_masked``, ``platform_tiles`` and ``platform_groups``. All functions
here equal a plain reference on every platform; ``tests/test_platform.py`` compares
them. Figures are of ``python -m benchmarks.chips`` (compiled) and ``python -m
benchmarks.step`` (run on a CPU); see ``benchmarks/README.md``.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Pair: TypeAlias = tuple[jax.Array, jax.Array]

LARGE = 2**16  # elements: below, what a barrier saves is not worth one


def run_on_cpu(fast: Callable[[Any], Any], plain: Callable[[Any], Any], x: Any) -> Any:
    """``fast(x)`` on a CPU, and ``plain(x)``, which equals it, elsewhere.

    For the convolutions of JointSpar's backward passes. XLA's CPU backend is fast over
    (batch, space, feature) only, and does not reorder by itself what is in a branch: a
    step of a small ResNet took 2.9 s in place of 0.2 s (jax 0.10.2).
    """
    return lax.platform_dependent(x, cpu=fast, default=plain)


def recompute_barrier(x: Any) -> Any:
    """``x``, from which the compiler computes again what it computed from it before.

    A GPU would keep the first result in memory from its first use to its second: one
    more copy of the parameters in :func:`slamb_jax.mask_momentum`. Each array has a
    barrier of its own, since one barrier would join the types of all its operands.
    """
    return jax.tree.map(lax.optimization_barrier, x)


def materialized(x: Any) -> Any:
    """``x``, computed once and kept in memory: the compiler fuses nothing across it."""
    return lax.optimization_barrier(x)


def computed_apart(x: Any) -> Any:
    """``x`` for the state, which a GPU computes apart from what else is of ``x``.

    What is an output it writes first, for others to read: ``lamb`` wrote the second
    moment so, whose old one it had to copy for that, and kept its direction. It took
    18.9 passes over the parameters for 14.7, and ``adamw`` 12.4 for 11.9.
    """

    def apart(x: Any) -> Any:
        return jax.tree.map(lambda x: materialized(jnp.ones((), x.dtype)) * x, x)

    return lax.platform_dependent(x, cuda=apart, rocm=apart, default=lambda x: x)


def opaque(tree: Any, fun: Callable[[Any], Any] = lambda x: x) -> Any:
    """``fun(tree)``, by itself the same arrays, that a CPU computes once and as it is.

    Of them its compiler knows nothing, where it forgets other barriers. It compiles
    equal kernels once, and each other one in 20 ms. Slices of an array are equal if
    where they start is an operand, and if the array is not computed in them.
    """

    def behind_a_branch(tree: Any) -> Any:
        is_true = lax.optimization_barrier(jnp.bool_(True))

        def zeros(tree: Any) -> Any:  # of what is not computed, for their types
            return jax.tree.map(jnp.zeros_like, fun(tree))

        return lax.cond(is_true, fun, zeros, tree)

    return lax.platform_dependent(tree, cpu=behind_a_branch, default=fun)


def hidden(numbers: Sequence[int]) -> list[jax.Array]:
    """Places in an array, as numbers that no kernel of a CPU has in it."""
    out: list[jax.Array] = opaque([jnp.uint32(x) for x in numbers])
    return out


def slices(
    flat: jax.Array, starts: Sequence[jax.Array], shapes: Sequence[tuple[int, ...]]
) -> list[jax.Array]:
    """The parts of a flat array that start there, in these shapes."""
    pairs = zip(starts, shapes, strict=True)
    return [
        lax.dynamic_slice(flat, (start,), (math.prod(shape),)).reshape(shape)
        for start, shape in pairs
    ]


def after_exchange(
    anew: Callable[[jax.Array, jax.Array], Pair],
    of_sent: Callable[[jax.Array], Pair] | None,
    g: jax.Array,
    m: jax.Array,
    sent: jax.Array,
) -> Pair:
    """What was sent of a leaf, and the momentum to keep, for the step that follows.

    They are computed ``anew(g, m)``: to keep ``sent`` would take one more copy of the
    parameters. A GPU keeps it where the momentum was, if that is not needed any more:
    ``of_sent(sent)``, which reads one array less. A TPU has it in fast memory
    and would have to write it, and a CPU took 1.1 times as long.
    """

    def again(g: jax.Array, m: jax.Array, sent: jax.Array) -> Pair:
        del sent
        return anew(recompute_barrier(g), recompute_barrier(m))

    if of_sent is None or g.size < LARGE:
        return again(g, m, sent)
    in_place = of_sent

    def keep(g: jax.Array, m: jax.Array, sent: jax.Array) -> Pair:
        del g, m
        return in_place(materialized(sent))

    return lax.platform_dependent(g, m, sent, cuda=keep, rocm=keep, default=again)


def reduce_blocks(
    planes: Sequence[jax.Array],
    two: Callable[[jax.Array, jax.Array], jax.Array],
    many: Callable[..., jax.Array],
) -> jax.Array:
    """Reduces the elements of each block: (..., rows, width) planes to (..., rows, 1).

    ``two`` reduces two arrays element by element, and ``many`` an axis of one array. A
    CPU halves a row again and again, in vectors, where XLA would reduce it element by
    element.
    """

    def at_once(x: jax.Array) -> jax.Array:
        return many(x, -1, keepdims=True)

    def by_halves(x: jax.Array) -> jax.Array:
        while x.shape[-1] > 1 and x.shape[-1] % 2 == 0:
            x = two(*jnp.split(x, 2, -1))
        return at_once(x)

    x = functools.reduce(two, planes)
    return lax.platform_dependent(x, cpu=by_halves, default=at_once)


def split_digits(
    packed: jax.Array, base: int, count: int, reciprocals: Sequence[tuple[int, int]]
) -> jax.Array:
    """Splits bytes into digits: uint8 (..., rows, width) to (..., count, rows, width).

    The first digit is the least. ``reciprocals`` has, for each power of the base, a
    factor and a shift that divide a byte by it in 16 bits. A CPU divides in vectors of
    bytes; a GPU or TPU has no integer division, and takes the reciprocals.
    """
    *lead, rows, width = packed.shape

    def in_turn(packed: jax.Array) -> jax.Array:
        flat, digits = packed.reshape(*lead, rows * width), []
        for _ in range(count):
            digits.append(lax.rem(flat, np.uint8(base)))
            flat = lax.div(flat, np.uint8(base))
        return jnp.concatenate(digits, -1).reshape(*lead, count, rows, width)

    def at_once(packed: jax.Array) -> jax.Array:
        wide = packed.astype(jnp.uint16)[..., None, :, :]
        each = (2, *(1 for _ in lead), count, 1, 1)
        factor, shift = np.array(reciprocals, np.uint16).T.reshape(each)
        above = (wide * factor) >> shift
        factor, shift = np.array(reciprocals[1], np.uint16)
        return (above - np.uint16(base) * ((above * factor) >> shift)).astype(jnp.uint8)

    return lax.platform_dependent(packed, cpu=in_turn, default=at_once)


def sum_of_rows(decode: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    """The sum of ``decode(row)`` over the rows.

    A CPU decodes row after row in a loop: to decode all rows and sum columns takes it
    six times as long.
    """

    def in_a_loop(rows: jax.Array) -> jax.Array:
        def row(i: jax.Array) -> jax.Array:
            return decode(lax.dynamic_index_in_dim(rows, i, keepdims=False))

        return lax.fori_loop(
            1, len(rows), lambda i, total: total + row(i), row(jnp.int32(0))
        )

    def at_once(rows: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(decode)(rows), 0)

    return lax.platform_dependent(rows, cpu=in_a_loop, default=at_once)
