"""One step in which only the layers drawn are exchanged and updated."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from slamb_jax import _axes as axes
from slamb_jax import _checks as checks
from slamb_jax._collectives import pany, pmean
from slamb_jax.exchange import Exchange, check_exchange
from slamb_jax.jointspar import distribution
from slamb_jax.jointspar.distribution import JointSparState, active_layers

Layers = Any  # a tree of labels, or a function of the parameters that returns one
Sampling = Literal["shared", "per_worker"]
# (mean gradients, trace, parameters, count) -> (updates, next trace)
Rule = Callable[[Any, Any, Any, jax.Array], tuple[optax.Updates, optax.Updates]]


def sample_layers(
    rule: Rule,
    exchange: Exchange,
    layers: Layers,
    budget: float,
    p_min: float | None,
    horizon: int,
    sampling: Sampling,
    seed: int,
) -> optax.GradientTransformationExtraArgs:
    """Applies ``rule`` to the layers drawn; other layers and traces stand still."""
    axis_name = _axis_of(exchange)
    checks.check_range("budget", budget, 0.0, open_low=True)
    if p_min is not None:
        checks.check_range("p_min", p_min, 0.0, 1.0, open_low=True)
    checks.check_integer("horizon", horizon, 1)
    checks.check_choice("sampling", sampling, ("shared", "per_worker"))
    checks.check_integer("seed", seed)
    draws_alone = sampling == "per_worker" and axis_name is not None

    def init(params: optax.Params) -> JointSparState:
        checks.check_floating(params, "params")
        names, labels = _labels(layers, params)
        missing = sorted(set(names) - set(jax.tree.leaves(labels)))
        if missing and jax.tree.leaves(params):
            found = ", ".join(map(repr, missing))
            raise ValueError(f"layers names {found}, of which there are no parameters")
        distribution.least_probability(p_min, budget, len(names))
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
        names, labels = _labels(layers, updates if params is None else params)
        tree: Any = jax.tree.structure(state.trace)
        labels, grads, traces = map(tree.flatten_up_to, (labels, updates, state.trace))
        active = active_layers(state)
        moves: dict[Any, Any] = {None: True} | active
        if draws_alone:  # a layer moves if at least one worker drew it
            flags = pany(jnp.stack([*active.values()]), axis_name)
            moves |= dict(zip(names, flags, strict=True))
        means = optax.tree.zeros_like(
            traces
        )  # and remain so where a gradient is missing
        norms = {}
        for name in (None, *names):
            rows = enumerate(zip(labels, grads, strict=True))
            here = [i for i, (label, g) in rows if label == name and g is not None]
            own = [grads[i] for i in here]
            if name is None:
                own = pmean(own, axis_name)
            else:
                own = [jnp.where(active[name], g, jnp.zeros_like(g)) for g in own]
                own, norms[name] = exchange_layer(own, state.log_p[name], moves[name])
            for i, mean in zip(here, own, strict=True):
                means[i] = mean.astype(traces[i].dtype)

        # Not in the branches of the exchange: the results of a branch take memory of
        # their own, which costs more than this arithmetic.
        stepped = rule(tree.unflatten(means), state.trace, params, state.count)

        def keep(label: str | None, g: Any, old: Any, u: Any, new: Any) -> Any:
            if g is None:
                return None, old
            u, new = u.astype(old.dtype), new.astype(old.dtype)
            u = jnp.where(moves[label], u, jnp.zeros_like(u))
            return u, jnp.where(moves[label], new, old)

        flat = map(tree.flatten_up_to, stepped)
        kept = [*map(keep, labels, grads, traces, *flat)]
        log_p, norm, drawn = (
            jnp.stack(jax.tree.leaves(x)) for x in (state.log_p, norms, active)
        )
        log_p, max_norm = distribution.update_distribution(
            log_p, norm, drawn, state.max_norm, budget, p_min, horizon
        )
        # A count that stood still at the largest int32 would repeat its draws for ever.
        is_last = state.count == np.int32(2**31 - 1)
        return tree.unflatten(u for u, _ in kept), JointSparState(
            count=jnp.where(is_last, np.int32(2**30), state.count + np.int32(1)),
            seed=state.seed,
            worker=axes.worker_index(axis_name) if draws_alone else state.worker,
            log_p=dict(zip(names, log_p, strict=True)),
            max_norm=max_norm,
            trace=tree.unflatten(trace for _, trace in kept),
        )

    def exchange_layer(
        grads: list[jax.Array], log_p: jax.Array, moves: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        """Means of a layer's gradients over p, and its norm; 0 if it stands still."""
        wide = [x.astype(jnp.float32) if x.dtype.itemsize < 4 else x for x in grads]
        norm, p = optax.tree.norm(wide).astype(jnp.float32), jnp.exp(log_p)
        weighted = [x / p.astype(x.dtype) for x in wide]
        shares = [x.astype(g.dtype) for x, g in zip(weighted, grads, strict=True)]
        if axes.axis_size(axis_name) == 1:
            return shares, norm
        means = axes.cond(  # all workers take the same branch
            moves,
            lambda arrays: pmean(arrays, axis_name),
            lambda arrays: [jnp.zeros_like(x) for x in arrays],
            shares if draws_alone else [*shares, norm],
        )
        return (means, norm) if draws_alone else (means[:-1], means[-1])

    return optax.GradientTransformationExtraArgs(init, update)


def _axis_of(exchange: Exchange) -> axes.AxisName | None:
    """The axis of an exchange; raises for settings that would have no effect."""
    plain = Exchange(check_exchange(exchange).axis_name)
    if exchange not in (plain, dataclasses.replace(plain, payload=None)):
        raise ValueError(
            f"exchange must be {plain}, got {exchange}: JointSpar averages gradients "
            "densely and at every step, and uses only the axis of an exchange"
        )
    return exchange.axis_name


def _labels(layers: Layers, params: chex.ArrayTree) -> tuple[list[str], chex.ArrayTree]:
    """The distinct labels, sorted, and a tree of the label of each parameter."""
    tree = layers(params) if callable(layers) else layers
    for path, label in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(label, str):
            raise ValueError(
                "layers must have strings or None for labels, got "
                f"{label!r} at layers{jax.tree_util.keystr(path)}"
            )
    try:
        labels = jax.tree.map(
            lambda label, below: jax.tree.map(lambda _: label, below),
            tree,
            params,
            is_leaf=lambda x: x is None,
        )
    except ValueError as error:
        raise ValueError(
            "layers must have the structure of the parameters or a prefix of it: "
            f"{error}"
        ) from error
    names = sorted(set(jax.tree.leaves(tree)))
    if not names:
        raise ValueError(f"layers must label at least one layer, got {tree!r}")
    return names, labels
