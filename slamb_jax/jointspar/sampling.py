"""One step over layers of which only those drawn are exchanged and updated."""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slamb_jax import _axes as axes
from slamb_jax._checks import (
    check_axis_name,
    check_choice,
    check_floating,
    check_integer,
    check_range,
)
from slamb_jax._collectives import pany, pmean
from slamb_jax._rounding import next_step, upcast_f32
from slamb_jax.jointspar.distribution import least_probability, update_distribution
from slamb_jax.jointspar.labels import Layers, layer_names, leaf_labels
from slamb_jax.jointspar.state import JointSparState, draw

Sampling = Literal["shared", "per_worker"]
Stepped: TypeAlias = tuple[optax.Updates, optax.Updates]  # updates and trace
# Of the mean gradients, the trace, the parameters and the count.
Rule: TypeAlias = Callable[[Any, Any, Any, jax.Array], Stepped]


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
    learn = functools.partial(
        update_distribution, budget=budget, p_min=p_min, horizon=horizon
    )

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
        axes.check_local(updates, axis_name)
        labels, treedef = leaf_labels(layers, updates if params is None else params)
        grads, traces = map(treedef.flatten_up_to, (updates, state.trace))
        wanted = active = draw(state)
        if draws_alone:  # by at least one worker
            flags = pany(jnp.stack([*active.values()]), axis_name)
            wanted = dict(zip(active, flags, strict=True))
        means = optax.tree.zeros_like(traces)  # where there is no gradient
        norms: dict[str, jax.Array] = {}
        for name in (None, *active):
            rows = enumerate(zip(labels, grads, strict=True))
            here = [i for i, (label, g) in rows if label == name and g is not None]
            own = [grads[i] for i in here]
            if name is None:
                own = pmean(own, axis_name)
            else:
                own = [jnp.where(active[name], g, jnp.zeros_like(g)) for g in own]
                own, norms[name] = _exchange(
                    own, state.log_p[name], wanted[name], axis_name, draws_alone
                )
            for i, mean in zip(here, own, strict=True):
                means[i] = mean.astype(traces[i].dtype)

        # Outside the branches of the exchange: what a branch returns is memory of its
        # own, which costs more than the arithmetic.
        stepped = rule(treedef.unflatten(means), state.trace, params, state.count)
        moves = {None: True} | wanted

        def select(label: str | None, g: Any, old: Any, u: Any, new: Any) -> Stepped:
            if g is None:
                return None, old
            u, new = u.astype(old.dtype), new.astype(old.dtype)
            moved = jnp.where(moves[label], u, jnp.zeros_like(u))
            return moved, jnp.where(moves[label], new, old)

        flat = map(treedef.flatten_up_to, stepped)
        kept = list(map(select, labels, grads, traces, *flat))
        log_p, norm, drawn = (
            jnp.stack(jax.tree.leaves(x)) for x in (state.log_p, norms, active)
        )
        log_p, max_norm = learn(log_p, norm, drawn, state.max_norm)
        return treedef.unflatten([u for u, _ in kept]), JointSparState(
            count=next_step(state.count),
            seed=state.seed,
            worker=axes.worker_index(axis_name) if draws_alone else state.worker,
            log_p=dict(zip(active, log_p, strict=True)),
            max_norm=max_norm,
            trace=treedef.unflatten([trace for _, trace in kept]),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _exchange(
    grads: list[jax.Array],
    log_p: jax.Array,
    wanted: jax.Array,
    axis_name: axes.AxisName | None,
    draws_alone: bool,
) -> tuple[list[jax.Array], jax.Array]:
    """Means of a layer's gradients over p, and its norm; zeros if it is not wanted."""
    wide = [upcast_f32(g) for g in grads]
    norm, p = optax.tree.norm(wide).astype(jnp.float32), jnp.exp(log_p)
    weighted = [x / p.astype(x.dtype) for x in wide]
    shares = [x.astype(g.dtype) for x, g in zip(weighted, grads, strict=True)]
    if axes.axis_size(axis_name) == 1:
        return shares, norm
    means = axes.cond(  # all workers take the same branch
        wanted,
        lambda arrays: pmean(arrays, axis_name),
        lambda arrays: [jnp.zeros_like(x) for x in arrays],
        shares if draws_alone else [*shares, norm],
    )
    return (means, norm) if draws_alone else (means[:-1], means[-1])
