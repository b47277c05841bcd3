"""One step over layers of which only those drawn are exchanged and updated."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slamb_jax._tree import axes
from slamb_jax._tree.checks import (
    check_axis_name,
    check_choice,
    check_floating,
    check_integer,
    check_range,
)
from slamb_jax._tree.rounding import upcast_f32
from slamb_jax.exchange.collectives import pany, pmean
from slamb_jax.jointspar.distribution import least_probability, update_distribution
from slamb_jax.jointspar.labels import Layers, layer_names, leaf_labels
from slamb_jax.jointspar.state import JointSparState, draw

Sampling = Literal["shared", "per_worker"]
Stepped: TypeAlias = tuple[optax.Updates, optax.Updates]  # updates and trace
Rule: TypeAlias = Callable[
    [optax.Updates, optax.Updates, optax.Params | None, jax.Array], Stepped
]  # of the mean gradients, the trace, the parameters and the count


def sample_layers(
    rule: Rule,
    layers: Layers,
    budget: float,
    p_min: float | None,
    horizon: int,
    axis_name: axes.AxisName | None,
    sampling: Sampling,
    seed: int,
) -> optax.GradientTransformationExtraArgs:
    """Applies ``rule`` to the layers drawn; the others and their traces stand still."""
    check_range("budget", budget, 0.0, open_low=True)
    if p_min is not None:
        check_range("p_min", p_min, 0.0, 1.0, open_low=True)
    check_integer("horizon", horizon, 1)
    check_axis_name(axis_name)
    check_choice("sampling", sampling, ("shared", "per_worker"))
    check_integer("seed", seed)
    draws_alone = sampling == "per_worker" and axis_name is not None

    def init(params: optax.Params) -> JointSparState:
        check_floating(params, "params")
        names = layer_names(layers, params)
        least_probability(p_min, budget, len(names))
        log_p = np.float32(np.log(budget / len(names)))
        return JointSparState(
            count=jnp.zeros([], jnp.int32),
            seed=jnp.asarray(seed, jnp.int32),
            worker=jnp.zeros([], jnp.int32),
            log_p={name: jnp.asarray(log_p) for name in names},
            max_norm=jnp.zeros([], jnp.float32),
            trace=optax.tree.zeros_like(params),
        )

    def update(
        updates: optax.Updates,
        state: JointSparState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, JointSparState]:
        del extra_args
        axes.check_local(updates, axis_name)
        labels, treedef = leaf_labels(layers, updates if params is None else params)
        grads, traces = map(treedef.flatten_up_to, (updates, state.trace))
        active = draw(state)
        wanted = _any_worker(active, axis_name) if draws_alone else active
        means: list[Any] = [None] * len(grads)
        norms: dict[str, jax.Array] = {}
        for name in (None, *active):
            here = [
                i for i, g in enumerate(grads) if g is not None and labels[i] == name
            ]
            own = [grads[i] for i in here]
            if name is None:
                own = pmean(own, axis_name)
            else:
                own = [jnp.where(active[name], g, jnp.zeros_like(g)) for g in own]
                own, norms[name] = _exchange(
                    own, state.log_p[name], wanted[name], axis_name, draws_alone
                )
            for i, mean in zip(here, own, strict=True):
                means[i] = mean

        means = [_as_trace(g, t) for g, t in zip(means, traces, strict=True)]
        stepped = rule(treedef.unflatten(means), state.trace, params, state.count)
        # Outside the branches of the exchange: what a branch returns is memory of its
        # own, which costs more than the arithmetic.
        rows = zip(
            labels, grads, traces, *map(treedef.flatten_up_to, stepped), strict=True
        )
        kept = [
            (None, old) if g is None else _select(wanted, label, old, u, trace)
            for label, g, old, u, trace in rows
        ]
        log_p, norm, drawn = (
            jnp.stack([x[name] for name in active])
            for x in (state.log_p, norms, active)
        )
        log_p, max_norm = update_distribution(
            log_p,
            norm,
            drawn,
            state.max_norm,
            budget=budget,
            p_min=least_probability(p_min, budget, len(active)),
            horizon=horizon,
        )
        return treedef.unflatten([u for u, _ in kept]), JointSparState(
            count=optax.safe_increment(state.count),
            seed=state.seed,
            worker=axes.worker_index(axis_name) if draws_alone else state.worker,
            log_p=dict(zip(active, log_p, strict=True)),
            max_norm=max_norm,
            trace=treedef.unflatten([trace for _, trace in kept]),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _any_worker(
    active: dict[str, jax.Array], axis_name: axes.AxisName
) -> dict[str, jax.Array]:
    """Whether at least one worker drew each layer."""
    flags = pany(jnp.stack([*active.values()]), axis_name)
    return dict(zip(active, flags, strict=True))


def _exchange(
    grads: list[jax.Array],
    log_p: jax.Array,
    wanted: jax.Array,
    axis_name: axes.AxisName | None,
    draws_alone: bool,
) -> tuple[list[jax.Array], jax.Array]:
    """Means of a layer's gradients over p, and its norm; zeros if it is not wanted."""
    norm, p = _norm(grads), jnp.exp(log_p)
    shares = [_divide(g, p) for g in grads]
    if axes.axis_size(axis_name) == 1:
        return shares, norm

    def mean(arrays: list[jax.Array]) -> list[jax.Array]:
        return pmean(arrays, axis_name)

    def zeros(arrays: list[jax.Array]) -> list[jax.Array]:
        return [jnp.zeros_like(x) for x in arrays]

    # All workers take the same branch.
    if draws_alone:
        return axes.cond(wanted, mean, zeros, shares), norm
    *means, norm = axes.cond(wanted, mean, zeros, [*shares, norm])
    return means, norm


def _select(
    wanted: dict[str, jax.Array],
    label: str | None,
    old: jax.Array,
    u: jax.Array,
    trace: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The update and the trace if the layer is wanted, else zeros and the old trace."""
    u, trace = u.astype(old.dtype), trace.astype(old.dtype)
    if label is None:
        return u, trace
    flag = wanted[label]
    return jnp.where(flag, u, jnp.zeros_like(u)), jnp.where(flag, trace, old)


def _as_trace(g: jax.Array | None, trace: optax.Updates) -> optax.Updates:
    """``g`` in the dtype of its trace; zeros if there is no gradient."""
    return optax.tree.zeros_like(trace) if g is None else g.astype(trace.dtype)


def _divide(g: jax.Array, p: jax.Array) -> jax.Array:
    wide = upcast_f32(g)
    return (wide / p.astype(wide.dtype)).astype(g.dtype)


def _norm(grads: list[jax.Array]) -> jax.Array:
    squares = [jnp.sum(jnp.square(upcast_f32(g))) for g in grads]
    return jnp.sqrt(sum((x.astype(jnp.float32) for x in squares), jnp.float32(0)))
