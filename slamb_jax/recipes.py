"""Settings by name: the paper's, and those to start from.

>>> import slamb_jax
>>> from slamb_jax import recipes
>>> recipe = recipes.FEW_BYTES
>>> tx = slamb_jax.slamb(0.02, recipe.exchange("data"), **recipe.optimizer)
>>> recipe.exchange("data", sync_every=50).sync_every
50

The learning rate is not in them: tune it. Nor is ``min_size``, which follows from the
parameters.
"""

import dataclasses
from typing import Any

from slamb_jax._tree.axes import AxisName
from slamb_jax.exchange.payloads import StochasticUniform
from slamb_jax.exchange.settings import Exchange


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of an :class:`Exchange`, and of the optimizer that suits it.

    Attributes:
      settings: keyword arguments of :class:`Exchange`.
      optimizer: keyword arguments of :func:`slamb`.
    """

    settings: dict[str, Any]
    optimizer: dict[str, Any]

    def exchange(self, axis_name: AxisName | None, **overrides: Any) -> Exchange:
        """The exchange between these workers; ``overrides`` replace settings."""
        return Exchange(axis_name, **self.settings | overrides)


PAPER = Recipe(
    {"compress_ratio": 0.1, "sync_every": 100, "b3": 0.93},
    {},
)
"""The paper's for BERT-Large, phase 1, at rate 6e-3. It sends 0.11 of the dense
bytes."""

FLOAT32 = Recipe(
    {"compress_ratio": 0.1, "sync_every": 70, "b3": 0.7},
    {"nu_of": "momentum"},
)
"""To start from, in float32. It sends 0.114 of the dense bytes."""

FEW_BYTES = Recipe(
    {
        "compress_ratio": 0.25,
        "sync_every": 12,
        "payload": "uniform4",
        "average_payload": "uniform8",
        "b3": 0.5,
    },
    {"nu_of": "momentum"},
)
"""Sends 0.053 of the dense bytes. It exchanges more of the momentum than
:data:`FLOAT32` and averages more often, in codes, and needs one more copy of the
parameters. For short runs whose workers see little data per step,
``compress_ratio=0.5`` (0.086 of the bytes) came out below dense LAMB's loss."""

LARGE_BATCH = Recipe(
    {
        "compress_ratio": 1 / 3,
        "sync_every": 14,
        "payload": StochasticUniform(bits=4, error_feedback=True),
        "average_payload": StochasticUniform(bits=4, mean_bits=8),
        "b3": 0.9,
    },
    {"nu_of": "larger"},
)
"""For long runs on large batches. It sends 0.057 of the dense bytes and needs two more
copies of the parameters. A worker's own momentum and gradient are worth more there, so
stale coordinates step nearly as far (b3), v is of the gradient unless the momentum is
larger, and what rounding takes is fed back."""
