"""SLAMB, dense LAMB and SGD with momentum from the same options, and what they send."""

import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import Mesh

import slamb_jax
from examples.common.options import Options
from examples.common.processes import AXIS


def optimizer(
    options: Options, schedule: optax.Schedule, mask: Any = None
) -> optax.GradientTransformationExtraArgs:
    """The chain that ``options`` name; ``mask`` says which leaves decay."""
    clip = optax.identity()
    if options.clip_norm is not None:
        clip = optax.clip_by_global_norm(options.clip_norm)
    if options.optimizer == "slamb":
        tx = optax.chain(clip, _slamb(options, schedule, mask))
    else:
        tx = optax.chain(_mean, clip, _dense(options, schedule, mask))
    if options.accumulate_steps > 1:
        tx = slamb_jax.accumulate(tx, options.accumulate_steps)
    return optax.with_extra_args_support(tx)


UNDECAYED = {"bias", "scale", "relative_position_bias"}


def kernels(params: Any) -> Any:
    """A decay mask: not biases, norms and tables of positions, by name.

    By name, since the biases of Flax's attention have two dimensions.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in UNDECAYED, params
    )


def _slamb(
    options: Options, schedule: optax.Schedule, mask: Any
) -> optax.GradientTransformation:
    return slamb_jax.slamb(
        schedule,
        axis_name=AXIS,
        compress_ratio=options.compress_ratio,
        b1=options.b1,
        b2=options.b2,
        b3=options.b3,
        eps=options.eps,
        weight_decay=options.weight_decay,
        mask=mask,
        sync_every=options.sync_every,
        form=options.form,
        min_size=options.min_size,
        nu_of=options.nu_of,
        payload=_codes(options.payload),
        average_payload=_codes(options.average_payload),
        seed=options.seed,
    )


def _codes(name: str | None) -> Any:
    """What the library calls a payload of that name."""
    bits = {"8bit": 8, "4bit": 4}
    return slamb_jax.StochasticUniform(bits[name]) if name in bits else name


_mean = optax.stateless(
    lambda grads, _: slamb_jax.average_parameters(grads, axis_name=AXIS)
)


def _dense(
    options: Options, schedule: optax.Schedule, mask: Any
) -> optax.GradientTransformation:
    if options.optimizer == "lamb":
        return optax.lamb(
            schedule,
            b1=options.b1,
            b2=options.b2,
            eps=options.eps,
            weight_decay=options.weight_decay,
            mask=mask,
        )
    return optax.chain(
        optax.add_decayed_weights(options.weight_decay, mask),
        optax.sgd(schedule, momentum=options.b1),
    )


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes a worker sends per step, on a ring, as compiled programs say."""

    exchange: dict[int, float]  # from a step on, at every step
    average: float  # at steps 0, H, 2H, ... counted from 0, besides
    sync_every: int
    dense: float  # what averaging the gradients would send, at every step

    def until(self, step: int) -> float:
        """Bytes sent in the first ``step`` steps."""
        ends = [*list(self.exchange)[1:], step]
        spans = zip(self.exchange.items(), ends, strict=True)
        sent = sum(
            each * max(0, min(end, step) - start) for (start, each), end in spans
        )
        return sent + self.average * -(-step // self.sync_every)


def traffic(options: Options, params: Any, mesh: Mesh) -> Traffic:
    """Compiles the optimizer alone, once for each ratio, and asks what it sends.

    So that exchange and average are told apart where both stand in branches: under
    gradient accumulation, and where k changes with the step.
    """
    alone = dataclasses.replace(options, accumulate_steps=1, clip_norm=None)
    dense = dataclasses.replace(alone, optimizer="sgdm")
    whole = _report(dense, params, mesh).bytes_sent()
    if options.optimizer != "slamb":
        return Traffic({0: whole}, 0.0, 1, whole)
    # With H = 2 the average stands in a branch, and nothing else does.
    ratios = options.compress_ratio
    phases = sorted(ratios.items()) if isinstance(ratios, dict) else [(0, ratios)]
    reports = {
        k: _report(
            dataclasses.replace(alone, compress_ratio=k, sync_every=2), params, mesh
        )
        for k in dict(phases).values()
    }
    average = next(iter(reports.values())).bytes_sent(conditional=True)
    exchange = {t: reports[k].bytes_sent() for t, k in phases}
    return Traffic(exchange, average, options.sync_every, whole)


def _report(options: Options, params: Any, mesh: Mesh) -> slamb_jax.WireReport:
    """Of a step that only updates, with the parameters for gradients."""
    tx = optimizer(options, optax.constant_schedule(options.learning_rate))

    def step(state: Any, batch: Any) -> tuple[Any, None]:
        params, opt_state = state
        updates, opt_state = tx.update(params, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    shapes = jax.eval_shape(lambda p: (p, tx.init(p)), params)
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype), shapes
    )
    run = slamb_jax.per_worker_step(step, mesh, AXIS)
    return slamb_jax.wire_report(run.lower(state, ()))
