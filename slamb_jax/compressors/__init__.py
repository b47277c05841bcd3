"""What sends: compressors, for links that keep what they do not send.

A compressor is an optax transformation that gets what a worker has, and returns
:class:`slamb_jax.Sent`: the mean of what all workers sent, and what this one did not
send. :func:`slamb_jax.mask_momentum` keeps that in the momentum,
:func:`slamb_jax.compress_with_error_feedback` in a residual, and
:func:`slamb_jax.average_parameters_every` takes the latter for its means.
"""

from slamb_jax.compressors.codec import Codec, from_codec
from slamb_jax.compressors.low_rank import low_rank
from slamb_jax.compressors.of_exchange import of_exchange
from slamb_jax.compressors.sparse import top_k

__all__ = ["Codec", "from_codec", "low_rank", "of_exchange", "top_k"]
