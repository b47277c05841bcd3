"""Arguments that are no hyperparameters, for ``optax.inject_hyperparams``.

It makes an array of every number, and calls every function with the step: a mask, say,
which then is one bool for all parameters, in silence. It binds the arguments by the
signature of the optimizer, and passes on what it does not know, which is used here.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from slamb_jax._core.keywords import explain_unknown
from slamb_jax._core.leaves import is_function

Make = TypeVar("Make", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class _Static:
    """A value that is no number, function or array to ``inject_hyperparams``."""

    value: Any


def static(*names: str, trees: tuple[str, ...] = ()) -> Callable[[Make], Make]:
    """Declares arguments that ``optax.inject_hyperparams`` is to pass on unchanged.

    Those in ``trees`` are hyperparameters unless they are a tree, or a function of the
    parameters that returns one.
    """

    class Signature(inspect.Signature):
        def bind(self, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
            bound = super().bind(*args, **kwargs)
            bound.apply_defaults()  # an integer among them would become an array
            for name, x in bound.arguments.items():
                if name in names or (name in trees and _is_of_params(x)):
                    bound.arguments[name] = _Static(x)
            return bound

    def declare(make: Make) -> Make:
        make = explain_unknown(make)

        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            given = {name: _value(x) for name, x in kwargs.items()}
            return make(*map(_value, args), **given)

        plain = inspect.signature(make)
        signature = Signature(
            [*plain.parameters.values()], return_annotation=plain.return_annotation
        )
        made.__signature__ = signature  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]

    return declare


def _value(x: Any) -> Any:
    return x.value if isinstance(x, _Static) else x


def _is_of_params(x: Any) -> bool:
    """Whether it is a tree or returns one for a tree, as no schedule of a step does."""
    if not callable(x):
        return False
    if not is_function(x):
        return True
    try:
        tree = x({"": np.ones((1, 1), np.float32)})
    except Exception:  # a schedule's, of whatever kind
        return False
    return not jax.tree_util.all_leaves([tree])
