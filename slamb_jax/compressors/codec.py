"""A compressor of two functions: how an array is sent, and how it is read."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slamb_jax._core import axes, checks
from slamb_jax._core.axes import AxisName
from slamb_jax._core.leaves import chosen, next_step, present, unless
from slamb_jax._core.platform import sum_in_turn
from slamb_jax.exchange import collectives


class Sent(NamedTuple):
    """What a compressor returns for what a worker has, x.

    What this worker sent is q = x - ``unsent``. So nothing is lost: over the workers
    the mean of x is ``mean`` plus the mean of ``unsent``.
    """

    mean: optax.Updates  # of q over the workers, the same bits on all of them
    unsent: optax.Updates  # x - q, the worker's own


class Codec(NamedTuple):
    """The two functions of a compressor, of one array each.

    A code is a tree of arrays, of bools or of numbers of 4 bits or more. Their shapes
    and dtypes follow from those of x alone. ``common`` is a random key that all workers
    have alike at a step, another for each array: what follows from it need not be sent.
    ``own`` differs between workers.

    Args:
      encode: of x (float32, of any shape), ``common`` and ``own``: the code, as it is
        sent.
      decode: of a code, a ``jax.ShapeDtypeStruct`` of x, and ``common``: the float32
        array that it stands for.
      averages: whether the mean of all codes is the code of the mean, as where
        ``encode`` is linear. Then one all-reduce takes them. The codes must be float32,
        in which they are summed.
    """

    encode: Callable[[jax.Array, jax.Array, jax.Array], Any]
    decode: Callable[[Any, jax.ShapeDtypeStruct, jax.Array], jax.Array]
    averages: bool = False


class CodecState(NamedTuple):
    """State of :func:`from_codec`; the same on all workers."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []


def from_codec(
    codec: Codec, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    r"""A compressor that sends each array as its code.

    .. math::

      q_i = \text{decode}(\text{encode}(x_i)), \quad
      M = \text{mean over workers of } q_i, \quad e_i = x_i - q_i

    The codes of all arrays travel as bytes in one message: each worker sends its own to
    the n - 1 others. That is less than an all-reduce in float32 if they have less than
    2/n of the arrays' bytes, and less than the default exchange below 0.1/n. With
    ``averages`` they travel in one all-reduce.

    Args:
      codec: the two functions.
      axis_name: the mesh axis (or axes) of the workers.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs` whose ``update`` returns
      :class:`slamb_jax.Sent`, for the links that take a compressor.

    Raises:
      ValueError: for ``axis_name`` None, and unless ``codec`` is a Codec; in
        ``update``, for an unbound axis, for a ``decode`` of another shape, for codes
        that cannot be sent or averaged, and for updates that were averaged already
        where the types show it.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> half = slamb_jax.compressors.Codec(  # of the bits of each number
      ...     lambda x, common, own: x.astype(jnp.bfloat16),
      ...     lambda code, like, common: code.astype(jnp.float32),
      ... )
      >>> tx = slamb_jax.compressors.from_codec(half, "data")
      >>> send = lambda x: tx.update(x, tx.init(x))[0]
      >>> sent = jax.vmap(send, axis_name="data")(jnp.array([1.0, 3.001]))
      >>> print(sent.mean, sent.unsent)
      [2. 2.] [0.         0.00099993]
    """
    check_has_axis(axis_name)
    checks.check_value(isinstance(codec, Codec), "codec", "a Codec", codec)

    def init(params: optax.Params) -> CodecState:
        checks.check_floating(params, "params")
        return CodecState(jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: CodecState,
        params: optax.Params | None = None,
        skip: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[Sent, CodecState]:
        del extra_args
        axes.check_local(updates, axis_name)
        checks.check_floating(updates, "updates")
        step = next_step(state.count)
        rows, rebuild = present(updates, like=updates if params is None else params)
        xs = [x.astype(jnp.float32) for _, x in rows]
        key = jax.random.fold_in(jax.random.key(0), step)
        common = [jax.random.fold_in(key, leaf.index) for leaf, _ in rows]
        worker = jax.lax.axis_index(axis_name)
        own = [jax.random.fold_in(key, worker) for key in common]
        codes = [codec.encode(*row) for row in zip(xs, common, own, strict=True)]
        if codec.averages:
            _check_summed(codes)

        def decoded(codes: Sequence[Any]) -> list[jax.Array]:
            return [
                _decode(codec, code, jax.ShapeDtypeStruct(x.shape, x.dtype), key)
                for code, x, key in zip(codes, xs, common, strict=True)
            ]

        q = decoded(codes)
        if codec.averages:
            treedef: Any
            flat, treedef = jax.tree.flatten(codes)
            means = decoded(treedef.unflatten(collectives.pmean(flat, axis_name)))
        else:
            n = axes.axis_size(axis_name)
            means = [x / n for x in _sum_of_all(codes, decoded, axis_name)]
        varying = [axes.varying_axes(x) for x in xs]
        means = [axes.vary_over(m, v) for m, v in zip(means, varying, strict=True)]
        unsent = [x - y for x, y in zip(xs, q, strict=True)]
        sent = Sent(rebuild(means), rebuild(unsent))
        return sent, chosen(skip, CodecState(unless(skip, state.count, step)))

    return optax.GradientTransformationExtraArgs(init, update)


def in_shape(x: jax.Array, like: Any) -> jax.Array:
    """What a compressor returns; raises for another shape, which would broadcast."""
    if jnp.shape(x) != like.shape:
        raise ValueError(f"compressor must return {like.shape}, got {jnp.shape(x)}")
    return x


def _decode(
    codec: Codec, code: Any, like: jax.ShapeDtypeStruct, common: jax.Array
) -> jax.Array:
    """What a code stands for, in float32; raises for another shape or kind."""
    x = jnp.asarray(codec.decode(code, like, common))
    if x.shape != like.shape or not jnp.isrealobj(x):
        raise ValueError(
            f"decode must return reals of shape {like.shape}, got {x.dtype} {x.shape}"
        )
    return x.astype(like.dtype)


def _check_summed(codes: Any) -> None:
    """Raises for codes whose sum or mean is not of their own dtype."""
    for x in jax.tree.leaves(codes):
        if x.dtype not in (jnp.float32, jnp.complex64):
            raise ValueError(
                f"encode must return float32, got {x.dtype}: averages=True sums it"
            )


def check_has_axis(axis_name: AxisName) -> None:
    """Raises unless it names an axis: a compressor sends between workers."""
    checks.check_axis_name(axis_name)
    if axis_name is None:
        raise ValueError("axis_name must name the axis of the workers, got None")


def _sum_of_all(
    codes: Any, decoded: Callable[[Any], list[jax.Array]], axis_name: AxisName
) -> list[jax.Array]:
    """The sums over the workers of what their codes stand for."""
    treedef: Any
    arrays, treedef = jax.tree.flatten(codes)
    # 1. The codes of all arrays as bytes, in one message.
    in_bytes = [_as_bytes(x) for x in arrays]
    ends = np.cumsum([x.size for x in in_bytes])
    gathered = collectives.send_to_all(jnp.concatenate(in_bytes), axis_name)

    # 2. Their sum, of one worker after the other.
    def decode_row(row: jax.Array) -> list[jax.Array]:
        codes = map(_from_bytes, jnp.split(row, ends[:-1]), arrays)
        return decoded(treedef.unflatten(codes))

    total: list[jax.Array] = sum_in_turn(decode_row, gathered)
    return total


def _as_bytes(x: jax.Array) -> jax.Array:
    """The bytes of an array, uint8 and flat."""
    flat = x.reshape(-1)
    if x.dtype == jnp.bool_:
        return jnp.packbits(flat)
    is_number = jnp.issubdtype(x.dtype, np.number)
    info = jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo
    bits = info(x.dtype).bits if is_number else 0
    if bits < 4:
        raise ValueError(
            "encode must return arrays of bools, or of numbers of 4 bits or more, got "
            f"{x.dtype}: send jax.random.key_data of a key, and pack smaller numbers"
        )
    if bits == 4:  # two to a byte, the last of which may be filled up
        flat = jnp.concatenate([flat, jnp.zeros(x.size % 2, x.dtype)])
    return flat.view(jnp.uint8)


def _from_bytes(data: jax.Array, like: jax.Array) -> jax.Array:
    """Undoes :func:`_as_bytes`, with the shape and dtype of ``like``."""
    if like.dtype == jnp.bool_:
        return jnp.unpackbits(data, count=like.size).astype(bool).reshape(like.shape)
    return data.view(like.dtype)[: like.size].reshape(like.shape)
