"""Shows which kernels run during a step's exchange, on chips that are not there.

Run from the root of the repository, with the extra ``gpu-aot`` or ``tpu-aot``:
``python -m benchmarks.chips.schedule --topology h100:1x1x8``. The training step of a
decoder, with and without ``overlap``, is compiled with XLA's latency-hiding scheduler;
for each collective the kernels that the schedule has between its start and its end.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.sharding import Mesh
from rich.console import Console

import slamb_jax
from benchmarks.chips.targets import AXIS, mesh_of, on_chips
from benchmarks.chips.traffic import traffic_of, walk
from benchmarks.rivals import elements
from examples.byte_lm.model import ByteLM, next_byte_loss
from examples.common.tables import table
from examples.hardware import hardware
from slamb_jax.wire.hlo import RING_SHARES, Instruction, parse_hlo

LATENCY_HIDING = "enable_latency_hiding_scheduler"  # options of XLA
ASYNCHRONOUS = "xla_tpu_enable_async_all_to_all"


@dataclasses.dataclass(frozen=True)
class Config:
    """The decoder, and the chips."""

    topology: str = "h100:1x1x8"
    layers: int = 4
    width: int = 512
    context: int = 256
    batch: int = 16
    """sequences of a worker"""


class Hidden(NamedTuple):
    """A collective, and the kernels between its start and its end."""

    kind: str
    sent: float  # bytes, by the ring convention
    kernels: int
    matmuls: int
    moved: float  # bytes that those kernels read and write


def hidden(text: str, workers: int) -> Iterator[Hidden]:
    """Of each collective of a scheduled program, in the order of their starts."""
    module = parse_hlo(text)
    body = module.computations[module.entry]
    names = list(body)
    for place, name in enumerate(names):
        x = body[name]
        inside = [y.collective for y in walk(module, x)]
        kind = next((k for k in inside if k is not None), None)
        if kind is None or not x.opcode.endswith("-start"):
            continue
        end = next(i for i, n in enumerate(names) if name in body[n].operands)
        between = [body[n] for n in names[place + 1 : end]]
        found = [traffic_of(module, y, body) for y in between]
        payload = sum(a.bytes for n in x.operands if n in body for a in body[n].arrays)
        yield Hidden(
            kind,
            RING_SHARES[kind](workers) * payload,
            sum(f.kernels for f in found),
            sum(any(map(_multiplies, walk(module, y))) for y in between),
            sum(f.bytes for f in found),
        )


def _multiplies(x: Instruction) -> bool:
    return x.opcode in ("dot", "convolution") or "gemm" in x.attributes


def compiled(config: Config, mesh: Mesh, *, overlap: bool) -> tuple[str, int]:
    """The scheduled program of a training step, and the bytes of the parameters."""
    net = ByteLM(config.layers, config.width, 8, config.context)
    exchange = slamb_jax.Exchange(AXIS, overlap=overlap)
    tx, loss = slamb_jax.adamw(1e-3, exchange), functools.partial(next_byte_loss, net)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    first = jnp.zeros((1, config.context), jnp.int32)
    params = jax.eval_shape(net.init, jax.random.key(0), first)["params"]
    state = params, jax.eval_shape(tx.init, params)
    rows = mesh.size * config.batch
    tokens = jax.ShapeDtypeStruct((rows, config.context + 1), jnp.int32)
    run = slamb_jax.per_worker_step(step, mesh, exchange)
    platform = mesh.devices.flat[0].platform
    options: dict[str, str | bool] = {f"xla_{platform}_{LATENCY_HIDING}": True}
    if platform == "tpu":
        options[ASYNCHRONOUS] = True
    program = run.lower(on_chips(state, mesh), tokens).compile(options)
    return str(program.as_text()), 4 * elements(params)


def main(config: Config) -> None:
    jax.config.update("jax_platforms", "cpu")
    mesh, rows = mesh_of(config.topology), []
    for overlap in (False, True):
        text, size = compiled(config, mesh, overlap=overlap)
        for found in hidden(text, mesh.size):
            rows.append(
                {
                    "overlap": str(overlap),
                    "collective": found.kind,
                    "MB sent": f"{found.sent / 1e6:.2f}",
                    "kernels meanwhile": f"{found.kernels}",
                    "matmuls": f"{found.matmuls}",
                    "MB that they move": f"{found.moved / 1e6:.1f}",
                }
            )
    if not rows:
        raise SystemExit(f"No collective is asynchronous on {config.topology}.")
    title = (
        f"decoder of {size / 4e6:.1f} M parameters, {config.batch} x {config.context} "
        f"bytes a worker; {config.topology}"
    )
    caption = f"compiled on {hardware(jax.devices()[0])}"
    Console(width=110).print(table(title, rows, caption))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
