"""Another direction for each kind of parameter."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from slamb_jax._core.checks import check_params
from slamb_jax._core.leaves import is_none

_TREES = ("second_moment",)  # that a direction gets beside its updates


def by_kind(
    kinds: Callable[[optax.Params], Any],
    transformations: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Each transformation for the leaves of its kind; None stands for the others.

    As ``optax.partition``, which refuses gradients that are None. ``kinds`` returns a
    tree of names like the parameters.
    """
    inner = {
        name: optax.with_extra_args_support(tx) for name, tx in transformations.items()
    }

    def part(tree: Any, names: Any, name: str) -> Any:
        return jax.tree.map(
            lambda x, kind: x if kind == name else None, tree, names, is_leaf=is_none
        )

    def init(params: optax.Params) -> dict[str, optax.OptState]:
        names = kinds(params)
        return {name: tx.init(part(params, names, name)) for name, tx in inner.items()}

    def update(
        updates: optax.Updates,
        state: dict[str, optax.OptState],
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, dict[str, optax.OptState]]:
        check_params(params)
        names, new_state = kinds(params), {}
        # Each kind fills its own places, and finds None in those of the others: such a
        # tree passes through the links of this library, which skip what is None.
        merged = jax.tree.map(lambda _: None, updates)
        for name, tx in inner.items():
            own = {
                key: part(x, names, name) if key in _TREES else x
                for key, x in extra_args.items()
            }
            u, new_state[name] = tx.update(
                part(updates, names, name),
                state[name],
                part(params, names, name),
                **own,
            )
            merged = jax.tree.map(
                lambda a, b: b if a is None else a, merged, u, is_leaf=is_none
            )
        return merged, new_state

    return optax.GradientTransformationExtraArgs(init, update)
