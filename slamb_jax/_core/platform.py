"""Barriers and platform branches, each with its reason and its figure.

All functions here equal a plain reference on every platform; ``tests/test_platform.py``
compares them. A trick stands here if it saves a tenth of the parameters' memory, or
15 % of the time of a step that was run. Figures are of ``python -m benchmarks.chips``
(compiled) and ``python -m benchmarks.step`` (run on a CPU): ``benchmarks/README.md``.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_CACHED = 2**17  # elements, with what is computed of them in the caches of a CPU


# Barriers.


def run_on_cpu(fast: Callable[[Any], Any], plain: Callable[[Any], Any], x: Any) -> Any:
    """``fast(x)`` on a CPU, and ``plain(x)``, which equals it, elsewhere.

    For the convolutions of JointSpar's backward passes: in a conditional XLA's CPU
    backend takes 28 times as long for them, so that none is skipped there.
    """
    return lax.platform_dependent(x, cpu=fast, default=plain)


def recompute(x: Any) -> Any:
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
    moment so, whose old one it had to copy for that, and kept its direction. It needed
    0.98 of the parameters in temporaries, for 0.37.
    """
    apart = functools.partial(
        jax.tree.map, lambda x: materialized(jnp.ones((), x.dtype)) * x
    )
    return lax.platform_dependent(x, cuda=apart, rocm=apart, default=lambda x: x)


def opaque(tree: Any, fun: Callable[[Any], Any] = lambda x: x) -> Any:
    """``fun(tree)``, by itself the same arrays, that a CPU computes once and as it is.

    Of them its compiler knows nothing, where it forgets other barriers. It compiles
    equal kernels once, and each other one in 20 ms. Slices of an array are equal if
    where they start is an operand, and if the array is not computed in them.
    """

    def on_cpu(tree: Any) -> Any:
        is_true = lax.optimization_barrier(jnp.bool_(True))
        # The other branch is never run: zeros of the same types.
        return lax.cond(
            is_true, fun, lambda tree: jax.tree.map(jnp.zeros_like, fun(tree)), tree
        )

    return lax.platform_dependent(tree, cpu=on_cpu, default=fun)


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


# Codes of few bits.


def map_groups(
    encode: Callable[[jax.Array, jax.Array], Any], x: jax.Array, group: tuple[int, ...]
) -> Any:
    """``encode(groups, first)`` of an array cut into groups, padded with zeros.

    ``groups`` is (number, *group) and ``first``, uint32, the number of the first of
    them. A CPU encodes a few at a time, in its caches, and the last group by itself:
    padded, the array would be copied. A step of AdamW with two workers takes 1.69 times
    as long as a dense one, for 2.26.
    """
    size = math.prod(group)

    def elsewhere(x: jax.Array, first: int = 0) -> Any:
        padded = jnp.pad(x.reshape(-1), (0, -x.size % size))
        return encode(padded.reshape(-1, *group), jnp.uint32(first))

    def on_cpu(x: jax.Array) -> Any:
        flat, full = x.reshape(-1), (x.size - 1) // size
        few = max(1, _CACHED // size)
        if full < few:  # all of it is in the caches
            return elsewhere(x)

        def encode_few(turn: jax.Array, out: Any) -> Any:
            # The last turn begins earlier, and encodes some groups once more.
            first = jnp.minimum(turn * np.uint32(few), np.uint32(full - few))
            start, sizes = (first * np.uint32(size),), (few * size,)
            part = opaque(flat, lambda x: lax.dynamic_slice(x, start, sizes))
            codes = encode(part.reshape(few, *group), first)
            update = functools.partial(lax.dynamic_update_slice_in_dim, axis=0)
            return jax.tree.map(lambda x, y: update(x, y, first), out, codes)

        # The last group by itself, behind zeros in place of the others.
        last = elsewhere(flat[full * size :], full)
        out = jax.tree.map(
            lambda x: jnp.pad(x, ((full, 0), *((0, 0),) * (x.ndim - 1))), last
        )
        turns = jnp.uint32(-(-full // few))
        return lax.fori_loop(jnp.uint32(0), turns, encode_few, out)

    return lax.platform_dependent(x, cpu=on_cpu, default=elsewhere)


def split_digits(packed: jax.Array, base: int, count: int) -> jax.Array:
    """Splits bytes into digits: uint8 (..., rows, width) to (..., count, rows, width).

    The first digit is the least. A CPU divides by one number at a time, in vectors of
    bytes. Elsewhere no digit depends on the one before: the kernel that reads digits
    splits them, and they are not in memory, a quarter of the parameters. On a CPU that
    step would take 1.94 times as long.
    """
    *lead, rows, width = packed.shape

    def on_cpu(packed: jax.Array) -> jax.Array:
        flat, digits = packed.reshape(*lead, rows * width), []
        for _ in range(count):
            digits.append(lax.rem(flat, np.uint8(base)))
            flat = lax.div(flat, np.uint8(base))
        return jnp.concatenate(digits, -1).reshape(*lead, count, rows, width)

    def elsewhere(packed: jax.Array) -> jax.Array:
        powers = base ** np.arange(count, dtype=np.uint8)
        packed, powers = lax.optimization_barrier((packed, jnp.asarray(powers)))
        powers = powers.reshape(*(1 for _ in lead), count, 1, 1)
        return lax.div(packed[..., None, :, :], powers) % np.uint8(base)

    return lax.platform_dependent(packed, cpu=on_cpu, default=elsewhere)


def sum_in_turn(decode: Callable[[jax.Array], Any], codes: jax.Array) -> Any:
    """The sum of what the codes of the workers, (n, ...), stand for; trees of arrays.

    One worker's after the other's: decoded together they may take n times the memory.
    And in one order on all workers, so that they find the same to the bit.
    """
    return lax.scan(
        lambda total, code: (jax.tree.map(jnp.add, total, decode(code)), None),
        decode(codes[0]),
        codes[1:],
    )[0]


def sum_of_codes(decode: Callable[[jax.Array], jax.Array], codes: jax.Array) -> Any:
    """The same sum for one worker alone, in any order.

    To decode all rows and sum columns takes a CPU six times as long as row after row.
    A loop makes two more passes over the parameters on a GPU, and a program for TPUs
    takes twice as long to compile.
    """
    return lax.platform_dependent(
        codes,
        cpu=functools.partial(sum_in_turn, decode),
        default=lambda codes: jnp.sum(jax.vmap(decode)(codes), 0),
    )
