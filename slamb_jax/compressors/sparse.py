"""A compressor that sends the largest coordinates of each array."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from slamb_jax._core.axes import AxisName
from slamb_jax._core.checks import check_range
from slamb_jax.compressors.codec import Codec, from_codec


def top_k(share: float, axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    r"""Sends the largest coordinates of each array, and where they are.

    .. math:: q_i = x_i \text{ where } |x_i| \text{ is among the } k
      \text{ largest}, \text{ else } 0

    Workers choose for themselves: the values, in float32, and their places, in 16 bits
    where an array has at most 65,536 coordinates and else in 32, go to all others.

    Args:
      share: of the coordinates, in (0, 1]; k is the nearest integer, at least 1.
      axis_name: the mesh axis (or axes) of the workers.

    Returns:
      A compressor: a :class:`optax.GradientTransformationExtraArgs` whose ``update``
      returns :class:`slamb_jax.Sent`.

    Raises:
      ValueError: for a value out of range.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.compressors.top_k(0.25, "data")
      >>> send = lambda x: tx.update(x, tx.init(x))[0]
      >>> x = jnp.array([[1.0, 0.0, 4.0, 2.0], [0.0, -6.0, 4.0, 2.0]])
      >>> print(jax.vmap(send, axis_name="data")(x).mean[0])
      [ 0. -3.  2.  0.]

    References:
      Aji and Heafield, `Sparse communication <https://arxiv.org/abs/1704.05021>`_,
      EMNLP 2017; Stich et al., `Sparsified SGD with memory
      <https://arxiv.org/abs/1809.07599>`_, NeurIPS 2018.
    """
    check_range("share", share, 0.0, 1.0, open_low=True)

    def encode(
        x: jax.Array, common: jax.Array, own: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del common, own
        flat = x.reshape(-1)
        count = min(x.size, max(1, round(share * x.size)))
        _, places = lax.top_k(jnp.abs(flat), count)
        narrow = jnp.uint16 if x.size <= 2**16 else jnp.uint32
        return flat[places], places.astype(narrow)

    def decode(
        code: tuple[jax.Array, jax.Array], like: jax.ShapeDtypeStruct, key: jax.Array
    ) -> jax.Array:
        del key
        values, places = code
        zeros = jnp.zeros(like.size, like.dtype)
        places = places.astype(jnp.int32)
        return zeros.at[places].set(values, unique_indices=True).reshape(like.shape)

    return from_codec(Codec(encode, decode), axis_name)
