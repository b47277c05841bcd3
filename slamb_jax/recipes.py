"""Settings of :func:`slamb_jax.slamb` by name: the authors', and those to start from.

Each is a mapping of keyword arguments, to be read, printed and overridden:

>>> import slamb_jax
>>> from slamb_jax import recipes
>>> tx = slamb_jax.slamb(0.02, axis_name="data", **recipes.FEW_BYTES)
>>> tx = slamb_jax.slamb(6e-3, **recipes.BERT | {"sync_every": 50})
>>> recipes.FLOAT32["b3"]
0.7

The rate is not in them: tune it. ``min_size`` is not in those to start from: what it
makes whole leaves travel is in the bytes (``slamb_jax.wire_report``, ``slamb-jax
advise``), so choose it for the model.
"""

import types
from collections.abc import Mapping
from typing import Any

from slamb_jax._uniform import StochasticUniform


def _settings(**settings: Any) -> Mapping[str, Any]:
    return types.MappingProxyType(settings)


_PUBLISHED: dict[str, Any] = {
    "compress_ratio": 0.1,
    "b1": 0.9,
    "b2": 0.999,
    "c_min": 0.01,
    "c_max": 1000.0,
    "min_size": 9000,
}

CIFAR10 = _settings(
    **_PUBLISHED, b3=0.99, sync_every=50, form="product", eps=1e-6, weight_decay=1e-4
)
"""The authors' for ResNet-110: rate 0.01, 4 workers x 256 images. Their larger k in the
first three epochs is ``compress_ratio={0: 0.5, 98: 0.2, 146: 0.1}``."""

SWIN = _settings(**_PUBLISHED, b3=0.999, sync_every=100, eps=1e-8, weight_decay=0.05)
"""The authors' for Swin-B on ImageNet; their decay spares biases and norms (``mask``),
and each worker clips its own gradient at 1."""

BERT = _settings(**_PUBLISHED, b3=0.93, sync_every=100)
"""The paper's for BERT-Large, phase 1, at rate 6e-3; what it does not tell is the
library's default."""

FLOAT32 = _settings(compress_ratio=0.1, b3=0.7, sync_every=70, nu_of="momentum")
"""To start from: float32, 0.114 of the bytes and the leaves that travel whole."""

FEW_BYTES = _settings(
    compress_ratio=0.25,
    b3=0.5,
    sync_every=12,
    nu_of="momentum",
    payload=StochasticUniform(bits=4),
    average_payload=StochasticUniform(bits=8),
)
"""0.053 of the bytes: more of the momentum than in :data:`FLOAT32`, averaged more
often, in codes. Needs another copy of the parameters, and time to code."""

LARGE_BATCH = _settings(
    compress_ratio=1 / 3,
    b3=0.9,
    sync_every=14,
    nu_of="larger",
    payload=StochasticUniform(bits=4, error_feedback=True),
    average_payload=StochasticUniform(bits=4, mean_bits=8),
)
"""For long runs on large batches: 0.057 of the bytes. A worker's own momentum and own
gradients say more there, so what is stale steps nearly as far (b3) and v is of the
gradient, but where the momentum is larger; what rounding takes is felt, so it is fed
back. Needs two more copies of the parameters, and time to code."""

NOISY = _settings(**{**FEW_BYTES, "compress_ratio": 0.5})
"""For short runs whose workers see little data per step, where it came out below dense
LAMB's loss: 0.086 of the bytes."""
