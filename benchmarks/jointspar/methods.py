"""JointSpar-LARS at several budgets, and what is trained beside it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

import slamb_jax
from benchmarks.frontier.tasks import Task
from benchmarks.rivals import averaged
from examples.byte_lm.train import AXIS, TRUST, matrices

SYNC_EVERY = 25  # of SLAMB


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the tables."""

    name: str
    rate: float  # the middle of its sweep
    make: Callable[..., optax.GradientTransformation]  # of schedule, task, D and steps
    share: float | None = None  # of JointSpar: s / D


def lars(rate: Any, *_: Any) -> optax.GradientTransformation:
    rule = optax.lars(rate, trust_coefficient=TRUST, trust_ratio_mask=matrices)
    return averaged(rule, AXIS)


def slamb(rate: Any, task: Task, *_: Any) -> optax.GradientTransformation:
    return slamb_jax.slamb(
        rate, axis_name=AXIS, b3=0.7, sync_every=SYNC_EVERY, min_size=task.min_size
    )


def sparse(share: float, sampling: str = "shared") -> Method:
    def make(
        rate: Any, task: Task, layers: int, steps: int
    ) -> optax.GradientTransformation:
        return slamb_jax.jointspar_lars(
            rate, task.layers, share * layers, horizon=steps, axis_name=AXIS,
            sampling=sampling, trust_coefficient=TRUST, trust_ratio_mask=matrices,
        )  # fmt: skip

    own = ", own draws" if sampling == "per_worker" else ""
    return Method(f"JointSpar-LARS, {share:g} D{own}", 1.0, make, share)


METHODS = (
    Method("LARS", 1.0, lars),
    sparse(0.75),
    sparse(0.5),
    sparse(0.5, "per_worker"),
    Method("LAMB", 0.02, lambda rate, *_: averaged(optax.lamb(rate), AXIS)),
    Method("SLAMB", 0.02, slamb),
)


def layer_sizes(task: Task, params: Any) -> dict[str | None, int]:
    """The elements of each layer; None's are those of what is always trained."""
    assert task.layers is not None  # the tasks here have them
    sizes: dict[str | None, int] = {None: 0}
    for name, label in task.layers(params).items():
        here = sum(x.size for x in jax.tree.leaves(params[name]))
        sizes[label] = sizes.get(label, 0) + here
    return sizes
