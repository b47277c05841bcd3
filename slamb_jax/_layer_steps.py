"""One step of every layer: exchanged and stepped if it was drawn, else left alone."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slamb_jax import _axes, _collectives
from slamb_jax._checks import (
    check_axis_name,
    check_choice,
    check_floating,
    check_integer,
    check_range,
)
from slamb_jax._distribution import check_budget
from slamb_jax._labels import Layers, labelled_leaves, layer_names
from slamb_jax._layer_draws import JointSparState, draw, drawn_from

SAMPLINGS = ("shared", "per_worker")

Rule = Callable[..., tuple[jax.Array, jax.Array]]  # of g, trace, p: update and trace
Stepped = tuple[jax.Array, jax.Array]  # an update and a trace


@dataclasses.dataclass(frozen=True)
class Settings:
    """What :func:`slamb_jax.jointspar` and its LARS have in common, checked."""

    layers: Layers
    budget: float
    p_min: float | None
    horizon: int
    axis_name: _axes.AxisName | None
    sampling: str
    seed: int

    def __post_init__(self) -> None:
        check_range("budget", self.budget, 0.0, open_low=True)
        if self.p_min is not None:
            check_range("p_min", self.p_min, 0.0, 1.0, open_low=True)
        check_integer("horizon", self.horizon, 1)
        check_axis_name(self.axis_name)
        check_choice("sampling", self.sampling, SAMPLINGS)
        check_integer("seed", self.seed)

    def of_distribution(self, layers: int) -> dict[str, Any]:
        """What the step of the distribution over so many layers takes."""
        p_min = self.budget / layers / 2 if self.p_min is None else self.p_min
        check_budget(self.budget, p_min, layers)
        return {"budget": self.budget, "p_min": p_min, "horizon": self.horizon}

    @property
    def own_draws_over(self) -> _axes.AxisName | None:
        """The axis whose workers draw each for itself; None if there is one draw."""
        return None if self.sampling == "shared" else self.axis_name


class _Leaf(NamedTuple):
    g: jax.Array
    trace: jax.Array
    p: jax.Array | None
    rule: Rule


def layer_steps(
    settings: Settings, rules: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
    """Draws layers, and steps each parameter of those by its rule.

    ``rules(count, updates, params)`` is a tree of functions, one per parameter.
    """
    layers, axis_name = settings.layers, settings.axis_name

    def init(params: optax.Params) -> JointSparState:
        check_floating(params, "params")
        names = layer_names(layers, params)
        settings.of_distribution(len(names))
        log_p = np.float32(np.log(settings.budget / len(names)))
        return JointSparState(
            count=jnp.zeros([], jnp.int32),
            seed=jnp.asarray(settings.seed, jnp.int32),
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
        _axes.check_local(updates, axis_name)
        like = updates if params is None else params
        labels, _, treedef = labelled_leaves(layers, like)
        trees = (
            updates, state.trace, like, rules(state.count, updates, params)
        )  # fmt: skip
        columns = (treedef.flatten_up_to(tree) for tree in trees)
        leaves = [_Leaf(*row) for row in zip(*columns, strict=True)]
        active = draw(state)
        stepped, norms = _step_all(settings, leaves, labels, active, state.log_p)
        new = drawn_from(
            state, active, norms, settings.own_draws_over,
            **settings.of_distribution(len(active)),
        )  # fmt: skip
        trace = treedef.unflatten([trace for _, trace in stepped])
        return treedef.unflatten([u for u, _ in stepped]), new._replace(trace=trace)

    return optax.GradientTransformationExtraArgs(init, update)


def _step_all(
    settings: Settings,
    leaves: list[_Leaf],
    labels: list[str | None],
    active: Mapping[str, jax.Array],
    log_p: Mapping[str, jax.Array],
) -> tuple[list[tuple[Any, Any]], dict[str, jax.Array]]:
    """Every leaf's update and trace, and every layer's norm."""
    places: dict[str | None, list[int]] = {name: [] for name in (None, *active)}
    for i, (leaf, label) in enumerate(zip(leaves, labels, strict=True)):
        if leaf.g is not None:
            places[label].append(i)
    out: list[tuple[Any, Any]] = [(None, leaf.trace) for leaf in leaves]
    norms: dict[str, jax.Array] = {}
    wanted = _wanted(settings, active)
    for label, here in places.items():
        own = [leaves[i] for i in here]
        if label is None:
            stepped = _step(own, settings.axis_name)
        else:
            draws = wanted[label], active[label], jnp.exp(log_p[label])
            stepped, norms[label] = _step_if(settings, own, *draws)
        for i, new in zip(here, stepped, strict=True):
            out[i] = new
    return out, norms


def _wanted(
    settings: Settings, active: Mapping[str, jax.Array]
) -> Mapping[str, jax.Array]:
    """The layers that anyone drew: the same on every worker."""
    if settings.own_draws_over is None:
        return active
    drawn = jnp.stack([x.astype(jnp.float32) for x in active.values()])
    (share,) = _collectives.mean_over([drawn], settings.axis_name)
    return {name: x > 0 for name, x in zip(active, share, strict=True)}


def _step_if(
    settings: Settings,
    leaves: list[_Leaf],
    wanted: jax.Array,
    active: jax.Array,
    p: jax.Array,
) -> tuple[list[Stepped], jax.Array]:
    """A layer's updates and traces, and its gradient's norm.

    The exchange stands in a branch, which all workers take or none; a norm that is
    averaged travels with the layer it belongs to. The step itself does not: what a
    branch returns is memory of its own, which costs more than the arithmetic.
    """
    own_draws = settings.own_draws_over is not None
    gs = [jnp.where(active, leaf.g, jnp.zeros_like(leaf.g)) for leaf in leaves]
    norm = _norm(gs)
    shares = [_divided(g, p) for g in gs]

    def mean(arrays: list[jax.Array]) -> list[jax.Array]:
        return _collectives.mean_over(arrays, settings.axis_name)

    def nothing(arrays: list[jax.Array]) -> list[jax.Array]:
        return [jnp.zeros_like(x) for x in arrays]

    if _axes.axis_size(settings.axis_name) == 1:
        means = shares
    elif own_draws:
        means = _axes.cond(wanted, mean, nothing, shares)
    else:
        *means, norm = _axes.cond(wanted, mean, nothing, [*shares, norm])
    out = []
    for leaf, g in zip(leaves, means, strict=True):
        u, trace = leaf.rule(g.astype(leaf.trace.dtype), leaf.trace, leaf.p)
        kept = jnp.where(wanted, trace, leaf.trace)
        out.append((jnp.where(wanted, u, jnp.zeros_like(u)), kept))
    return out, norm


def _step(leaves: list[_Leaf], axis_name: _axes.AxisName | None) -> list[Stepped]:
    """Steps along the workers' mean gradients."""
    means = _collectives.mean_over([leaf.g for leaf in leaves], axis_name)
    return [
        leaf.rule(mean.astype(leaf.trace.dtype), leaf.trace, leaf.p)
        for leaf, mean in zip(leaves, means, strict=True)
    ]


def _divided(g: jax.Array, p: jax.Array) -> jax.Array:
    wide = _collectives.widened(g)
    return (wide / p.astype(wide.dtype)).astype(g.dtype)


def _norm(gs: list[jax.Array]) -> jax.Array:
    squares = [jnp.sum(jnp.square(_collectives.widened(g))) for g in gs]
    total = sum((x.astype(jnp.float32) for x in squares), jnp.float32(0))
    return jnp.sqrt(total)
