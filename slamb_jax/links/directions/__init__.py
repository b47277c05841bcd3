"""What an optimizer does with the momentum: ``slamb_jax.directions``.

A direction is an optax transformation whose ``update`` takes the momentum as its
updates. So most optax transformations are one:

>>> import optax, slamb_jax
>>> exchange = slamb_jax.Exchange("data")
>>> signum = optax.chain(
...     slamb_jax.mask_momentum(exchange, optax.scale_by_sign()),
...     optax.scale_by_learning_rate(1e-3),
... )
"""

from slamb_jax.links.directions.adam import adam
from slamb_jax.links.directions.muon import DimensionNumbers, muon

__all__ = ["DimensionNumbers", "adam", "muon"]
