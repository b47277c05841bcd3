"""Trains the byte-level model with one optimizer on all workers."""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from examples.byte_lm.data import batches
from examples.byte_lm.model import ByteLM, blocks, next_byte_loss

AXIS = "data"


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run; the rates are tuned for these (see sweep.py)."""

    optimizer: tuple[Literal["lamb", "slamb", "lars", "jointspar_lars"], ...] = (
        "lamb",
        "slamb",
    )
    """What to train with, one after the other; shares of bytes are of the first's."""
    workers: int = 8
    steps: int = 500
    batch: int = 8  # sequences per worker and step
    context: int = 64  # bytes per sequence
    layers: int = 3
    width: int = 96
    heads: int = 4
    lamb_rate: float = 0.015
    slamb_rate: float = 0.02
    compress_ratio: float = 0.1
    b3: float = 0.7
    sync_every: int = 25
    min_size: int = 9000
    nu_of: Literal["gradient", "momentum", "larger"] = "gradient"
    """What SLAMB's v is the second moment of."""
    selection: Literal["strided", "permutation", "bernoulli", "top_k"] = "strided"
    overlap: bool = False  # exchange behind the forward and backward pass
    lars_rate: float = 1.0
    jointspar_rate: float = 1.0
    budget: float = 2.0  # blocks that JointSpar trains per step, of all layers
    p_min: float | None = None  # the least probability of a block; half of budget / D
    precision: Literal[
        "float32", "bfloat16", "bfloat16_master", "bfloat16_stochastic"
    ] = "float32"
    """Of parameters and SLAMB's moments; how small steps are kept from being lost."""
    evaluations: int = 10
    eval_batch: int = 512  # held-out sequences
    seed: int = 0
    files: tuple[Path, ...] = ()  # train on these instead of the standard library
    out: Path = Path("runs/byte_lm")

    def __post_init__(self) -> None:
        counts = ("workers", "steps", "batch", "context", "layers", "width", "heads")
        for name in (*counts, "evaluations", "eval_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer from 1, got {value!r}")
        for name in ("lamb_rate", "slamb_rate", "lars_rate", "jointspar_rate"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"{name} must be finite and not negative, got {value!r}"
                )
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, got {self.width} and {self.heads}"
            )
        slamb(self)  # which checks the rest


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run gave."""

    name: str
    steps: list[int]
    losses: list[float]  # evaluation loss, nats per byte, after those steps
    bytes_per_step: float  # sent by each worker, averaged over a cycle of H steps
    step_seconds: float  # median
    local_bytes_per_step: float = 0.0  # of them, those within a group of devices
    blocks: dict[str, Any] | None = None  # of JointSpar: see blocks_drawn


def schedule(peak: float, steps: int) -> optax.Schedule:
    """Linear warm-up over a tenth of the run, cosine to zero."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps)


def lamb(config: Config) -> optax.GradientTransformation:
    """Dense LAMB: gradients averaged over the workers at every step."""
    mean = optax.stateless(
        lambda grads, _: slamb_jax.average_parameters(grads, axis_name=AXIS)
    )
    return optax.chain(mean, optax.lamb(schedule(config.lamb_rate, config.steps)))


def slamb(config: Config) -> optax.GradientTransformation:
    """SLAMB: a tenth of the momentum per step, parameters every H steps."""
    return slamb_jax.slamb(
        schedule(config.slamb_rate, config.steps),
        axis_name=AXIS,
        compress_ratio=config.compress_ratio,
        b3=config.b3,
        sync_every=config.sync_every,
        min_size=config.min_size,
        selection=config.selection,
        nu_of=config.nu_of,
        overlap=config.overlap,
        mu_dtype=None if config.precision == "float32" else "bfloat16",
        nu_dtype=None if config.precision == "float32" else "bfloat16",
    )


TRUST = 0.005  # LARS's relative step at a rate of 1, before momentum


def matrices(params: optax.Params) -> optax.Params:
    """Those that LARS gives a rate of their own; biases and norms start from zero."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def lars(config: Config) -> optax.GradientTransformation:
    """Dense LARS: gradients averaged over the workers at every step."""
    mean = optax.stateless(
        lambda grads, _: slamb_jax.average_parameters(grads, axis_name=AXIS)
    )
    rate = schedule(config.lars_rate, config.steps)
    rule = optax.lars(rate, trust_coefficient=TRUST, trust_ratio_mask=matrices)
    return optax.chain(mean, rule)


def jointspar_lars(config: Config) -> optax.GradientTransformation:
    """JointSpar-LARS: the drawn blocks' gradients, the others are not computed."""
    return slamb_jax.jointspar_lars(
        schedule(config.jointspar_rate, config.steps),
        blocks,
        config.budget,
        p_min=config.p_min,
        horizon=config.steps,
        axis_name=AXIS,
        trust_coefficient=TRUST,
        trust_ratio_mask=matrices,
        seed=config.seed,
    )


OPTIMIZERS = {
    "lamb": ("LAMB (dense)", lamb),
    "slamb": ("SLAMB", slamb),
    "lars": ("LARS (dense)", lars),
    "jointspar_lars": ("JointSpar-LARS", jointspar_lars),
}


def train(
    name: str,
    tx: optax.GradientTransformation,
    config: Config,
    text: np.ndarray,
    held_out: np.ndarray,
    mesh: jax.sharding.Mesh,
    report: Callable[[int, list[float]], None],
) -> Result:
    """Trains from the same start on the same batches, whatever the optimizer.

    A second axis of the mesh is that of the devices within a worker.
    """
    model = ByteLM(config.layers, config.width, config.heads, config.context)
    first = jnp.zeros((1, config.context), jnp.int32)
    params = model.init(jax.random.key(config.seed), first)["params"]
    if config.precision != "float32":
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    if rounding := config.precision.partition("_")[2]:
        tx = slamb_jax.train_in_bfloat16(tx, rounding, seed=config.seed)

    opt_state = tx.init(params)
    draws = isinstance(opt_state, slamb_jax.JointSparState)

    def step(state: tuple, text: jax.Array) -> tuple[tuple, tuple]:
        params, opt_state = state
        active = slamb_jax.active_layers(opt_state) if draws else None
        p = slamb_jax.layer_probabilities(opt_state) if draws else None
        loss, grads = jax.value_and_grad(
            lambda p: next_byte_loss(model, p, text, active)
        )(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (loss, active, p)

    state = slamb_jax.replicate((params, opt_state), mesh, AXIS)
    local = mesh.axis_names[1] if len(mesh.axis_names) > 1 else None
    run = slamb_jax.per_worker_step(step, mesh, AXIS, local_axis_name=local)
    size = config.workers * config.batch
    stream = batches(text, size, config.context, config.steps, config.seed)
    wire = slamb_jax.wire_report(run.lower(state, text_like(size, config)))

    evaluate = evaluator(model, held_out, config)
    due = np.linspace(0, config.steps, config.evaluations + 1).round()[1:]
    steps, losses, times, drawn = [], [], [], []
    for i, batch in enumerate(stream, 1):
        start = time.perf_counter()
        state, (_, *about) = jax.block_until_ready(run(state, batch))
        times.append(time.perf_counter() - start)
        drawn.append(jax.tree.map(lambda x: x[0], jax.device_get(about)))
        if i in due:
            steps.append(i)
            losses.append(evaluate(slamb_jax.consolidate(state[0])))
        report(i, losses)
    seconds = float(np.median(times[1:] or times))
    found = blocks_drawn(config, drawn) if draws else None
    # What stands in a branch: the average of parameters, or the blocks, all of a size.
    often = found["active"] if found else 1 / config.sync_every
    sent = wire.bytes_sent() + wire.bytes_sent(conditional=True) * often
    within = 0.0
    if local:
        within = wire.bytes_over(mesh, local)
        within += wire.bytes_over(mesh, local, conditional=True) * often
    return Result(name, steps, losses, sent, seconds, within, found)


def blocks_drawn(config: Config, drawn: list[Any]) -> dict[str, Any]:
    """The budget, what came of it, and each block's probability at each step."""
    names = list(drawn[0][0])
    return {
        "budget": config.budget,
        "p_min": config.p_min or config.budget / len(names) / 2,
        "active": float(np.mean([[*active.values()] for active, _ in drawn])),
        "probabilities": {k: [float(p[k]) for _, p in drawn] for k in names},
    }


def text_like(size: int, config: Config) -> jax.ShapeDtypeStruct:
    """The shape of a batch."""
    return jax.ShapeDtypeStruct((size, config.context + 1), jnp.int32)


def evaluator(
    model: ByteLM, held_out: np.ndarray, config: Config
) -> Callable[[optax.Params], float]:
    """A function of parameters: the loss on a fixed sample of the held-out text."""
    (sample,) = batches(held_out, config.eval_batch, config.context, 1, seed=1)
    loss = jax.jit(lambda params: next_byte_loss(model, params, sample))
    return lambda params: float(loss(params))
