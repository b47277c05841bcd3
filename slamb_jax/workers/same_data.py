"""Whether the workers see the same kind of data, told from their momenta."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax.workers.mesh import replicated
from slamb_jax.workers.replicas import check_replicas


def momentum_agreement(state: chex.ArrayTree) -> dict[str, float]:
    r"""How far the workers' momenta agree, for each leaf; low where their data differ.

    With the momenta :math:`m_i` of n workers:

    .. math::

      a = \sqrt n\,\frac{\|\text{mean over workers of } m_i\|}
        {\sqrt{\text{mean over workers of } \|m_i\|^2}}

    That is :math:`\sqrt n` where all momenta are equal and about 1 where they are
    independent noise. Workers that draw from the same data are in between. Clearly
    below 1 the momenta oppose each other: the workers see different data. Look at the
    median of the leaves in the first steps. ``python -m benchmarks.different_data``
    prints it. Below 0.7 the default exchange is right, and exchanges whose workers step
    by themselves are not.

    Nothing is sent for it unless it is called; a call averages the momenta once.

    Args:
      state: a state of all workers with a leading replica axis, as :func:`replicate`
        returns it and a step gives it back. With several processes, each must call it.

    Returns:
      a for each leaf of each momentum, ``mu`` in the state, by its path; 0 for a
      momentum of zeros. A selection that exchanges a share of the
      momentum makes its momenta agree, so that there it tells less.

    Raises:
      ValueError: for a leaf without a leading axis, and for a state without a ``mu``.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.sgd(0.1, slamb_jax.Exchange("data"), momentum=0.9)
      >>> params = jnp.zeros((4, 3))
      >>> grads = jnp.tile(jnp.array([[1.0], [1.0], [-1.0], [-0.9]]), 3)
      >>> _, state = jax.vmap(tx.update, axis_name="data")(
      ...     grads, jax.vmap(tx.init)(params), params
      ... )
      >>> {k: round(v, 2) for k, v in slamb_jax.momentum_agreement(state).items()}
      {'[0].mu': 0.05}
    """
    check_replicas("state", state)
    leaves = {
        jax.tree_util.keystr(path): m
        for path, m in jax.tree_util.tree_leaves_with_path(state)
        if m.size and any(map(_is_momentum, path))
    }
    if not leaves:
        raise ValueError(
            "state must hold a momentum, mu, of an optimizer, got "
            f"{jax.tree.structure(state)}"
        )
    found = np.asarray(replicated(_agreements, list(leaves.values())))
    return dict(zip(leaves, map(float, found), strict=True))


def _is_momentum(key: Any) -> bool:
    """Whether a part of a path is ``mu``, of a named tuple or of a dictionary."""
    return "mu" in (getattr(key, "name", None), getattr(key, "key", None))


def _agreements(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_agreement(x) for x in leaves])


def _agreement(m: jax.Array) -> jax.Array:
    n = m.shape[0]
    wide = m.astype(jnp.float32).reshape(n, -1)
    largest = jnp.max(jnp.abs(wide))
    wide = wide / jnp.where(largest > 0, largest, np.float32(1))
    of_mean = jnp.sum(jnp.square(jnp.mean(wide, 0)))
    of_each = jnp.sum(jnp.square(wide)) / np.float32(n)
    ratio = of_mean / jnp.where(of_each > 0, of_each, np.float32(1))
    return jnp.sqrt(np.float32(n) * ratio)
