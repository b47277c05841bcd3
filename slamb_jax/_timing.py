"""What the update itself costs, measured."""

import numbers
import time
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from slamb_jax._checks import check_range
from slamb_jax._slamb import slamb

_MOST = 2**24  # elements of a tree that is timed as it is
_ROUNDS = 7


class OptimizerSeconds(NamedTuple):
    """Seconds that one update and its application take, nothing exchanged."""

    lamb: float
    slamb: float


def measure_optimizers(
    params: float | chex.ArrayTree,
    *,
    compress_ratio: float = 0.1,
    min_size: int = 9000,
    mu_dtype: Any = None,
) -> OptimizerSeconds:
    """Times ``optax.lamb`` and :func:`slamb`, update and apply, on this machine.

    The two take turns on jax's default device; buffers are donated; medians of 7
    after 2. A tree of up to 2**24 elements is timed as it is. For a larger one, or a
    number, up to 16 float32 leaves of 1024 x 1024 with a bias each are timed, and
    the times scaled by the number of elements.

    Args:
      params: the number of parameters, or a tree of arrays or of
        ``jax.ShapeDtypeStruct``; only shapes and dtypes are looked at.
      compress_ratio: as in :func:`slamb`.
      min_size: as in :func:`slamb`.
      mu_dtype: as in :func:`slamb`.

    Returns:
      :class:`OptimizerSeconds`: ``lamb`` and ``slamb``.

    Raises:
      ValueError: for a value out of range, and for ``params`` without elements.

    Examples:
      >>> import slamb_jax
      >>> lamb, slamb = slamb_jax.measure_optimizers(20_000)
      >>> lamb > 0 and slamb > 0
      True
    """
    shapes = as_shapes(params)
    elements = sum(x.size for x in jax.tree.leaves(shapes))
    if elements > _MOST or isinstance(params, numbers.Real):
        shapes = _stand_in(elements)
    factor = elements / sum(x.size for x in jax.tree.leaves(shapes))
    tx = slamb(
        1e-3, compress_ratio=compress_ratio, min_size=min_size, mu_dtype=mu_dtype
    )
    with jax.numpy_dtype_promotion("standard"):  # optax.lamb needs it
        lamb_seconds, slamb_seconds = _times([optax.lamb(1e-3), tx], shapes)
    return OptimizerSeconds(lamb_seconds * factor, slamb_seconds * factor)


def as_shapes(params: float | chex.ArrayTree) -> chex.ArrayTree:
    """A tree of shapes and dtypes: that of ``params``, or one of so many elements.

    Raises:
      ValueError: unless ``params`` is a number of at least 1, or a tree with elements.
    """
    if isinstance(params, numbers.Real):
        check_range("params", params, 1.0, open_high=True)
        return jax.ShapeDtypeStruct((int(float(params)),), jnp.float32)
    shapes = jax.eval_shape(lambda tree: tree, params)
    if not sum(x.size for x in jax.tree.leaves(shapes)):
        raise ValueError(f"params must have elements, got {shapes!r}")
    return shapes


def _stand_in(elements: int) -> chex.ArrayTree:
    """About as many elements, within what is timed, in leaves as of a transformer."""
    pairs = min(max(elements, 2**20), _MOST) // 2**20
    pair = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1024, 1024), (1024,))]
    return [pair] * pairs


def _times(
    optimizers: list[optax.GradientTransformation], shapes: chex.ArrayTree
) -> list[float]:
    """The median seconds of each, taking turns."""

    def draw() -> chex.ArrayTree:
        def wave(x: jax.ShapeDtypeStruct) -> jax.Array:
            angles = jnp.arange(x.size, dtype=jnp.float32)
            return jnp.sin(angles).reshape(x.shape).astype(x.dtype)

        return jax.tree.map(wave, shapes)

    def program(tx: optax.GradientTransformation) -> Any:
        def step(state: Any, grads: Any) -> Any:
            params, opt_state = state
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        return jax.jit(step, donate_argnums=0)

    steps = [program(tx) for tx in optimizers]
    states = [(params, tx.init(params)) for tx in optimizers for params in [draw()]]
    grads = draw()
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(_ROUNDS + 2):
        for i, step in enumerate(steps):
            start = time.perf_counter()
            states[i] = jax.block_until_ready(step(states[i], grads))
            times[i].append(time.perf_counter() - start)
    return [sorted(t[2:])[_ROUNDS // 2] for t in times]
