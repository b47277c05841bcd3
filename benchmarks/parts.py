"""Times the parts of an exchange in codes on a CPU, each as a program of its own.

Run from the root of the repository: ``python -m benchmarks.parts``. Processor's time,
which other programs on the machine disturb less than the clock's; the parts take turns,
and the least of their times counts.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

from examples.common.tables import table
from examples.hardware import hardware
from slamb_jax._core.platform import reduce_blocks
from slamb_jax.exchange.codecs import BlockCodec, Draw, codec_of

SEED = np.uint32(5)
CALLS = 3  # that are timed at once
Part = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Config:
    """The parts to time."""

    payloads: tuple[str, ...] = ("ternary", "uniform4", "uniform8")
    shape: tuple[int, int] = (3072, 768)
    """of the leaf"""
    rounds: int = 9


def parts_of(codec: BlockCodec, x: jax.Array) -> dict[str, Part]:
    """The parts of a payload, on one leaf."""
    group = codec.group_of(x.size)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % group.size))
    groups = flat.reshape(-1, *group[1:])
    encode = functools.partial(codec.encode_array, group=group, seed=jnp.uint32(SEED))
    digits, scales = jax.jit(encode)(x)

    draws = codec.base != 3
    reduction = (jnp.maximum, jnp.max) if draws else (jnp.add, jnp.sum)

    def norms(groups: jax.Array) -> jax.Array:
        planes = [jnp.abs(groups[:, i]) for i in range(group.planes)]
        return reduce_blocks(planes, *reduction)

    def random(groups: jax.Array) -> list[jax.Array]:
        planes = [groups[:, i] for i in range(group.planes)]
        return Draw(jnp.uint32(SEED), jnp.uint32(0)).bits(planes)

    def decoded(y: jax.Array, digits: jax.Array, scales: jax.Array) -> jax.Array:
        flat = codec.decode(digits, scales).reshape(-1)
        return y * flat[: x.size].reshape(x.shape)

    found: dict[str, Part] = {
        "norm of each block": (norms, (groups,)),
        "random bits, written": (random, (groups,)),
        "encode, all of it": (encode, (x,)),
        "decode, written in groups": (codec.decode, (digits, scales)),
        "decode and multiply, in the leaf's shape": (decoded, (x, digits, scales)),
    }
    if not draws:
        del found["random bits, written"]
    return found


def seconds(compiled: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """The processor's time of a call."""
    began = time.process_time()
    for _ in range(CALLS):
        out = compiled(*args)
    jax.block_until_ready(out)
    return (time.process_time() - began) / CALLS


def main(config: Config) -> None:
    x = jax.random.normal(jax.random.key(0), config.shape)
    parts: dict[tuple[str, str], Part] = {
        ("", "floor: x * 2"): (lambda x: np.float32(2) * x, (x,)),
        ("", "x * y"): (jnp.multiply, (x, x + 1)),
    }
    for payload in config.payloads:
        codec = codec_of(payload)
        if codec is None:
            raise SystemExit(f"--payloads: {payload!r} has no codes")
        parts |= {(payload, k): part for k, part in parts_of(codec, x).items()}
    compiled = {key: jax.jit(f).lower(*a).compile() for key, (f, a) in parts.items()}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in parts}
    for _ in range(1 + config.rounds):  # the first for new pages
        for key, (_, args) in parts.items():
            times[key].append(seconds(compiled[key], args))
    least = {key: f"{1e9 * min(t[1:]) / x.size:.2f}" for key, t in times.items()}
    names = list(dict.fromkeys(name for _, name in parts))
    columns = ["", *config.payloads]
    rows = [
        {"": name} | {c or "none": least.get((c, name), "") for c in columns}
        for name in names
    ]
    caption = f"a leaf of {' x '.join(map(str, config.shape))}; ns a parameter, the "
    caption += f"least of {config.rounds}; {hardware(jax.devices()[0])}"
    Console(width=100).print(table("Parts of an exchange in codes", rows, caption))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
