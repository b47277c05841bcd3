"""What a TPU's compiler puts between the start and the end of SLAMB's exchange.

Run from the root of the repository, on any machine, with the extra ``tpu-aot``:
``python -m benchmarks.overlap``. It compiles a whole training step (forward, backward,
update) of a tower of dense layers for chips that are not there, with and without
``overlap``, and counts in the schedule the matrix products between the start of each
exchange and its end. It takes minutes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import slamb_jax
from benchmarks.chips import AXIS, mesh_of, on_chips
from examples.hardware import hardware
from slamb_jax.wire.hlo import parse_hlo

PRODUCTS = {"convolution", "dot"}


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile."""

    topology: str = "v5p:4x4x4"
    layers: int = 6  # of two matrices each, width x 4 width and back
    width: int = 1024
    tokens: int = 4096  # of a worker


def compiled(config: Config, mesh: Mesh, *, overlap: bool) -> str:
    """The scheduled HLO of the step."""
    exchange = slamb_jax.Exchange(AXIS, overlap=overlap)
    tx = slamb_jax.slamb(1e-3, exchange)

    def loss_of(params: Any, x: jax.Array) -> jax.Array:
        for up, down in params:
            x = x + jax.nn.gelu(x @ up) @ down
        return jnp.mean(jnp.square(x))

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    d = config.width
    block = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((d, 4 * d), (4 * d, d))]
    params = [block] * config.layers
    state = on_chips((params, jax.eval_shape(tx.init, params)), mesh)
    x = on_chips(jax.ShapeDtypeStruct((config.tokens, d), jnp.float32), mesh, join=True)
    run = slamb_jax.per_worker_step(step, mesh, exchange)
    return str(run.lower(state, x).compile().as_text())


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """A collective in the schedule of the entry computation."""

    name: str
    begins: int  # matrix products scheduled before it begins
    ends: int  # and before it ends: as many, where nothing runs beside it


def schedule(hlo: str) -> tuple[list[Scheduled], int]:
    """The collectives of every step, in order; and the products of the whole step."""
    module = parse_hlo(hlo)
    began: dict[str, int] = {}
    seen, found = 0, []
    for name, x in module.computations[module.entry].items():
        inside = list(module.within(x))
        seen += any(y.opcode in PRODUCTS for y in inside)
        if x.opcode.endswith("-done"):
            if x.operands[0] in began:
                found.append(Scheduled(name, began.pop(x.operands[0]), seen))
        elif x.opcode == "conditional" or not any(y.collective for y in inside):
            continue
        elif x.opcode.endswith("-start"):
            began[name] = seen
        else:
            found.append(Scheduled(name, seen, seen))
    return found, seen


def main(config: Config) -> None:
    jax.config.update("jax_platforms", "cpu")
    console, mesh = Console(width=110), mesh_of(config.topology)
    table = Table(
        title=f"SLAMB on {config.topology}, {config.layers} layers of width "
        f"{config.width}, {config.tokens} tokens a worker",
        caption=f"compiled on {hardware(jax.devices()[0])}",
    )
    for head in ("overlap", "exchange", "begins after", "ends after", "products"):
        table.add_column(head, justify="right")
    for overlap in (False, True):
        found, products = schedule(compiled(config, mesh, overlap=overlap))
        for x in found:
            row = overlap, x.name, x.begins, x.ends, products
            table.add_row(*map(str, row))
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
