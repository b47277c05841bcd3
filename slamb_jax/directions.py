"""What an optimizer does with an exchanged momentum: ``slamb_jax.directions``.

A direction is an optax transformation whose ``update`` takes the momentum as its
updates. If it has an argument ``grad``, :func:`slamb_jax.mask_momentum` passes it the
worker's own gradient. So most optax transformations are one:

>>> import optax, slamb_jax
>>> exchange = slamb_jax.Exchange("data")
>>> signum = optax.chain(
...     slamb_jax.mask_momentum(exchange, optax.scale_by_sign()),
...     optax.scale_by_learning_rate(1e-3),
...     slamb_jax.average_parameters_every(exchange),
... )
"""

from slamb_jax.links.directions import DimensionNumbers, adam, lion, muon

__all__ = ["DimensionNumbers", "adam", "lion", "muon"]
