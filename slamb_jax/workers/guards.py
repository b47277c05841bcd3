"""Checks of a step: of its arguments and results, on all workers and processes."""

import functools
import hashlib
import warnings
from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from slamb_jax._core.axes import as_tuple
from slamb_jax._core.checks import named_leaves
from slamb_jax.exchange.settings import Exchange
from slamb_jax.workers import agreement
from slamb_jax.workers.mesh import check_replicas, gather, is_held

_EXCHANGED = {  # by which states
    "momentum": ("MaskMomentumState", "CompressState"),
    "parameters": ("AverageParametersState",),
}
#: The call of a step after which :class:`Watch` looks at the state once more.
LATER = 300


def check_wrappers(state: chex.ArrayTree, exchange: Exchange) -> None:
    """Raises, or warns, for transformations that do not suit an exchange as they stand.

    1. Under ``optax.apply_if_finite`` one worker skips a step, and the others wait.
    2. Under ``optax.MultiSteps`` each mini-step exchanges.
    3. A chain averages the parameters, and further links change them.
    4. A chain exchanges twice.
    5. Parameters that come apart are never averaged.
    """
    find = optax.tree.get_all_with_path
    if _has_state(find(state, "ApplyIfFiniteState"), "slamb_jax."):
        raise ValueError(
            "the state is of optax.apply_if_finite around an exchange: workers would "
            "wait for one that skips. Take slamb_jax.skip_not_finite(tx, exchange)"
        )
    told = []
    exchanging = "slamb_jax.links.", "slamb_jax.jointspar."
    if _has_state(find(state, "MultiStepsState"), *exchanging):
        told.append(
            "the state is of optax.MultiSteps around an exchange: it exchanges at each "
            "mini-step, and drops the result of all but the last. Take "
            "slamb_jax.accumulate(tx, every), which exchanges once for the same step"
        )
    for chain in _chains(state):
        names = [type(part).__name__ for part in chain]
        if "AverageParametersState" in names:
            later = chain[names.index("AverageParametersState") + 1 :]
            if _has_state(later, "optax.", "slamb_jax."):
                told.append(
                    "average_parameters_every averages what the links after it in "
                    "its chain change once more: put it last"
                )
        for what, states in _EXCHANGED.items():
            sent = [part for part in chain if any(find(part, name) for name in states)]
            if len(sent) > 1:
                told.append(
                    f"{len(sent)} links in one chain exchange the {what}: leave all "
                    "but one out. One may be the compressor of mask_momentum"
                )
    every = None if exchange.averages_momentum else exchange.sync_every
    has_average = find(state, "AverageParametersState")
    if every and find(state, "MaskMomentumState") and not has_average:
        told.append(
            f"the exchange averages the parameters every {every} steps, and no link of "
            "the state does: put average_parameters_every last"
        )
    for text in told:  # to who called replicate, or the init of on_workers
        warnings.warn(text, stacklevel=3)


def _chains(tree: Any) -> list[tuple[Any, ...]]:
    """The states of ``optax.chain`` in a tree, and in these states themselves."""

    def is_chain(part: Any) -> bool:
        return type(part) is tuple

    chains = list(filter(is_chain, jax.tree.leaves(tree, is_leaf=is_chain)))
    return chains + [x for chain in chains for part in chain for x in _chains(part)]


def _has_state(tree: Any, *modules: str) -> bool:
    """Whether a tree has a state of these modules in it, with an array."""
    is_state = functools.partial(_is_from, modules)
    states = filter(is_state, jax.tree.leaves(tree, is_leaf=is_state))
    return any(map(jax.tree.leaves, states))


def _is_from(modules: tuple[str, ...], part: object) -> bool:
    """Whether a part of a tree is of a class from one of these modules."""
    return type(part).__module__.startswith(modules)


def check_arguments(state: Any, batch: Any, n: int, devices: int) -> None:
    """Raises unless ``state`` is there n times and ``batch`` can be split."""
    for name, x in named_leaves("state", state).items():
        if is_held(x) and x.is_deleted():
            raise ValueError(  # jaxlib may crash on it
                f"{name} was donated to an earlier step and is gone: go on with the "
                "state that it returned, or keep jax.tree.map(jnp.copy, state)"
            )
    check_replicas("state", state, n)
    scalars_only = not any(map(jnp.ndim, jax.tree.leaves(batch)))
    for name, x in named_leaves("batch", batch).items():
        shape = jnp.shape(x)  # a scalar beside arrays goes to all workers
        if shape[0] % devices if shape else scalars_only:
            raise ValueError(
                f"{name} must have a multiple of {devices} rows, got shape {shape}"
            )


def check_result(out: Any, state: Any) -> tuple[Any, Any]:
    """What a step returned; raises unless it is a state like the old and a report."""
    wanted: Any = jax.tree.structure(state)
    is_pair = isinstance(out, tuple) and len(out) == 2
    if not is_pair or jax.tree.structure(out[0]) != wanted:
        raise ValueError(
            "step must return (state, report), with a state of the structure that it "
            f"got, {wanted}, got {jax.tree.structure(out)}"
        )
    return out


class Watch:
    """Looks at the first call of a step, and at the state once again much later.

    Where the exchange has all workers take the same step, what they began with in
    common stays the same, but for the exchange's own state. A leaf that comes apart is
    told once: nobody averages it, as with an optimizer of a part of the parameters that
    has no exchange.
    """

    def __init__(self, jitted: Any, mesh: Mesh, exchange: Exchange):
        self._jitted, self._mesh, self._exchange = jitted, mesh, exchange
        self._calls, self._told = 0, set[str]()

    def __call__(self, state: Any, *others: Any) -> tuple[Any, Any]:
        """The step; its first call raises for programs or devices that differ."""
        is_first = not self._calls
        if is_first:
            traced = self._jitted.trace(state, *others)  # once: jax keeps it
            check_same_program(traced, self._mesh, self._exchange)
            self._told = set(self._differing(state))
        state, report = self._jitted(state, *others)
        if is_first:
            check_copies(state, self._exchange)
        self._calls += 1
        if is_first or self._calls == LATER:
            self._tell(state)
        return state, report

    def _tell(self, state: Any) -> None:
        """Warns of the leaves that have come apart, and were not told before."""
        apart = [name for name in self._differing(state) if name not in self._told]
        self._told.update(apart)
        if apart:
            more = f" and {len(apart) - 5} more" if len(apart) > 5 else ""
            warnings.warn(
                f"after call {self._calls} of the step workers differ in "
                f"{', '.join(apart[:5])}{more}, which began the same on all: no "
                "exchange averages it. Step parameters by slamb_jax.adamw(rate, "
                "exchange) in place of optax.adamw, or slamb_jax.mask_momentum("
                "exchange, tx), and average statistics by slamb_jax."
                "average_parameters. Filter this warning if they are to differ",
                stacklevel=4,  # who called the step
            )

    def _differing(self, state: Any) -> list[str]:
        """The leaves outside of this library's states that workers do not share."""
        if not self._exchange.averages_momentum:
            return []
        others = jax.tree.map(
            lambda x: None if _is_ours(x) else x, state, is_leaf=_is_ours
        )
        return list(agreement.differing("state", others))


def _is_ours(part: object) -> bool:
    """Whether it is a state of this library, or the dictionary flax.nnx makes of it."""
    fields = set(part) if isinstance(part, Mapping) else set()
    is_made = {"count", "mu"} <= fields or {"residual", "compressor"} <= fields
    return is_made or _is_from(("slamb_jax.",), part)


def check_same_program(
    traced: jax.stages.Traced, mesh: Mesh, exchange: Exchange
) -> None:
    """Raises if processes have programs that differ, before one of them is run.

    They would wait for each other for ever, or add up what does not belong together.
    """
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) < max(2, jax.process_count()):
        return  # not all processes are here to compare
    text = traced.lower().as_text()
    digests = gather(hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) > 1:
        raise ValueError(
            f"step must be one program in all processes, and differs with {exchange!r}"
        )


def check_same_values(tree: chex.ArrayTree) -> None:
    """Raises if processes gave :func:`replicate` different values."""
    if jax.process_count() == 1 or not all(map(is_held, jax.tree.leaves(tree))):
        return
    for name in agreement.differing("tree", tree):
        raise ValueError(
            f"{name} must be the same in all processes: begin with one seed in all"
        )


def check_copies(state: Any, exchange: Exchange) -> None:
    """Raises if the devices of a worker hold different copies of its state."""
    axes = as_tuple(exchange.local_axis_name) + exchange.shard_axes
    for name, x in named_leaves("state", state).items() if axes else ():
        if agreement.differing_copies(x):
            raise ValueError(
                f"{name} that step returned differs between the devices of a worker, "
                f"along {', '.join(map(repr, axes))}: average it over the axis "
                "(slamb_jax.average_parameters, or average_gradients before "
                "accumulate), give slamb_jax.skip_not_finite the exchange, or report it"
            )
