"""Whether replicas agree, how far momenta do, and other numbers for a log."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from slamb_jax._core.checks import check_range, named_leaves
from slamb_jax._core.rounding import hash_u32, upcast_f32
from slamb_jax.exchange.collectives import as_integers
from slamb_jax.exchange.nbytes import means_of, share
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.workers import mesh as meshes
from slamb_jax.workers.mesh import check_replicas, raw, stacked


def assert_replicas_agree(tree: chex.ArrayTree, rtol: float = 0.0) -> None:
    r"""Raises unless all replicas are the same, and names the leaves that differ.

    Replicas must be the same to the bit, and only a 64-bit checksum of each is
    communicated. With a tolerance, each must be near the first or the same to the bit:
    :math:`\|p_i - p_1\| \le rtol\,\|p_1\|`. Parameters pass with 0 under the default
    exchange, and after :func:`average_parameters`; after
    :func:`average_parameters_every` with 1e-5, in 16 bits with 1e-2. Momenta differ by
    design.

    If ``optax.multi_transform`` or ``optax.masked`` stands around an exchange, what
    another optimizer steps follows each worker's own gradients, and nothing averages
    it: :func:`per_worker_step` warns of it. Then give the whole as a direction,
    ``slamb_jax.mask_momentum(exchange, optax.multi_transform(...))``, or chain
    ``slamb_jax.average_parameters_every`` behind it, with ``payload=None``.

    Args:
      tree: arrays with a leading replica axis. Each process must call it.
      rtol: largest norm of a difference, relative to the leaf's norm; not negative.
        Counts and keys, and the copies on the devices of one worker, must be the same
        to the bit.

    Raises:
      AssertionError: if replicas differ.
      ValueError: unless all leaves have a leading axis of the same length, and for
        ``rtol`` out of range.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> ours, other = slamb_jax.sgd(0.1, slamb_jax.Exchange("data")), optax.sgd(0.1)
      >>> tx = optax.multi_transform(
      ...     {"ours": ours, "other": other}, {"w": "ours", "b": "other"}
      ... )
      >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g), g)[0], axis_name="data")
      >>> updates = step({"w": jnp.eye(2), "b": jnp.eye(2)})
      >>> slamb_jax.assert_replicas_agree(updates["w"])
      >>> slamb_jax.assert_replicas_agree(updates)
      Traceback (most recent call last):
      AssertionError: replicas differ in 1 of 2 leaves: ['b'] (of 1 from the first)
    """
    check_range("rtol", rtol, 0.0, open_high=True)
    check_replicas("tree", tree)
    named = named_leaves("", tree)
    copies = {name: str(differing_copies(x))[1:-1] for name, x in named.items()}
    for what, of, differ in (
        ("the devices of a replica hold different copies", "of replica {}", copies),
        ("replicas differ", "of {} from the first", differing("", tree, rtol)),
    ):
        bad = [f"{k or 'the tree'} ({of.format(x)})" for k, x in differ.items() if x]
        if bad:
            where = f"{len(bad)} of {len(named)} leaves: {', '.join(bad)}"
            raise AssertionError(f"{what} in {where}")


def differing(name: str, tree: chex.ArrayTree, rtol: float = 0.0) -> dict[str, int]:
    """By the name of a leaf, how many of its replicas differ from the first, if any."""
    named = named_leaves(name, tree)
    if not named:
        return {}
    leaves = list(named.values())
    sums = checksums(leaves)
    differ = (sums != sums[:, :1]).any(-1)
    real = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if rtol > 0 and real:
        norms = stacked(_distances, [leaves[i] for i in real])
        differ[real] &= ~(norms[:, :-1] <= rtol * norms[:, -1:])  # a NaN is not near
    return {k: n for k, n in zip(named, differ.sum(1), strict=True) if n}


def _distances(x: jax.Array) -> jax.Array:
    """Each replica's distance to the first, and the first's norm, in units: (n + 1,).

    The unit is the first's largest element, so that no square of its own leaves the
    range. Infinities that are equal are at no distance.
    """
    wide = upcast_f32(x).reshape(x.shape[0], -1)
    first = wide[:1]
    apart = jnp.where(wide == first, 0, wide - first)
    rows = jnp.concatenate([apart, jnp.where(jnp.isfinite(first), first, 0)])
    tiny = np.finfo(np.float32).tiny
    # XLA may divide by its reciprocal, which has to be in the range, too.
    unit = jnp.clip(jnp.max(jnp.abs(rows[-1]), initial=0), tiny, 1 / tiny)
    norms = jnp.linalg.norm(rows / unit.astype(rows.dtype), axis=1)
    return norms.astype(jnp.float32)


def checksums(leaves: list[Any]) -> np.ndarray:
    """A 64-bit checksum of each replica of each leaf: uint32, (leaves, replicas, 2)."""
    return stacked(_checksum, map(_words_on_host, map(raw, leaves)))


def _words_on_host(x: Any) -> Any:
    """An array on the host as words of 32 bits, to which jax would cut wider ones."""
    if not isinstance(x, np.ndarray) or x.dtype.itemsize < 8:
        return x
    return np.ascontiguousarray(x).view(np.uint32).reshape(len(x), -1)


def _checksum(x: jax.Array) -> jax.Array:
    """Two sums of a hash of each element's bits and place, for each replica."""
    if x.dtype.name in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn"):
        x = x.astype(jnp.float32)  # which holds each exactly
    words = as_integers(x).astype(jnp.uint32).reshape(x.shape[0], -1)
    place = jnp.arange(words.shape[1], dtype=jnp.uint32) * np.uint32(0x9E3779B1)
    hashed = [hash_u32(words ^ np.uint32(s), place[None]) for s in (0, 0x9E3779B9)]
    return jnp.stack([jnp.sum(x, axis=1, dtype=jnp.uint32) for x in hashed], axis=1)


def differing_copies(x: Any) -> list[int]:
    """The replicas of a leaf whose devices hold copies that differ.

    jax never compares them: under ``check_vma=False`` the program has to make them the
    same. Where a device holds several replicas, the first stands for all.
    """
    x = raw(x)
    here = meshes.mesh_sharding(x)
    if not here or here.num_devices * math.prod(here.shard_shape(x.shape)) == x.size:
        return []
    held = [shard.data for shard in x.addressable_shards]
    shape = here.num_devices * len(held[0]), *held[0].shape[1:]
    split = NamedSharding(here.mesh, PartitionSpec(here.mesh.axis_names))
    all_held = jax.make_array_from_single_device_arrays(shape, split, held)
    sums = checksums([all_held])[0].reshape(here.num_devices, -1)
    unlike: set[int] = set()
    first: dict[str, np.ndarray] = {}  # by part of the array
    indices = here.devices_indices_map(x.shape)
    for device, sum_of_part in zip(here.mesh.devices.flat, sums, strict=True):
        index = indices[device]
        if (sum_of_part != first.setdefault(str(index), sum_of_part)).any():
            unlike.add(index[0].start or 0)
    return sorted(unlike)


def momentum_agreement(state: chex.ArrayTree) -> dict[str, float]:
    r"""How far the workers' momenta agree, for each leaf; low where their data differ.

    With the momenta :math:`m_i` of n workers, and means over the workers:

    .. math:: a = \sqrt n\,\|\text{mean } m_i\|\,/\,\sqrt{\text{mean } \|m_i\|^2}

    a is :math:`\sqrt n` where all momenta are equal, about 1 where they are independent
    noise, and clearly below 1 where the workers see different data. Look at the median
    of the leaves in the first steps. Below 0.7 the default exchange is right, and
    exchanges whose workers step by themselves are not.

    Args:
      state: a state of all workers with a leading replica axis. Each process must call
        it.

    Returns:
      a for each leaf of each momentum, ``mu`` in the state, by its path; 0 for a
      momentum of zeros. It tells less under a ``selection``, which makes momenta agree.

    Raises:
      ValueError: unless all leaves have a leading axis of the same length, and for a
        state without a ``mu``.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> momenta = {"mu": jnp.array([[1.0, 1.0], [-1.0, -0.9]])}
      >>> {k: round(a, 2) for k, a in slamb_jax.momentum_agreement(momenta).items()}
      {"['mu']": 0.05}
    """
    check_replicas("state", state)
    leaves = {k: m for k, m in leaves_in(state, "mu").items() if m.size}
    if not leaves:
        got = jax.tree.structure(state)
        raise ValueError(f"state must hold a momentum, mu, of an optimizer, got {got}")
    agreement = stacked(_agreement, list(leaves.values()))
    return dict(zip(leaves, map(float, agreement), strict=True))


def leaves_in(state: chex.ArrayTree, field: str) -> dict[str, Any]:
    """The leaves in fields of this name, of a named tuple or a dictionary, by path."""
    return {
        jax.tree_util.keystr(path): x
        for path, x in jax.tree_util.tree_leaves_with_path(state)
        if field in [getattr(key, "name", getattr(key, "key", None)) for key in path]
    }


def _agreement(m: jax.Array) -> jax.Array:
    wide = upcast_f32(m).reshape(len(m), -1)
    tiny = np.finfo(np.float32).tiny  # for a momentum of zeros
    largest = jnp.maximum(jnp.max(jnp.abs(wide)), tiny)
    wide = wide / largest.astype(wide.dtype)  # so that no square overflows
    norm = jnp.maximum(jnp.linalg.norm(wide), np.float32(1))  # 0 or at least 1
    return np.float32(len(m)) * jnp.linalg.norm(jnp.mean(wide, 0)) / norm


def exchange_metrics(
    exchange: Exchange, params: chex.ArrayTree
) -> Callable[[chex.ArrayTree], dict[str, float]]:
    r"""Makes a function of the state that returns numbers of the exchange for a log.

    Args:
      exchange: the exchange of the optimizer.
      params: the parameters, or their shapes and dtypes, without an axis of replicas.

    Returns:
      A function of the state of all workers, to call in each process, and seldom, since
      it averages the momenta once. It returns a dictionary:

      * ``exchange/bytes_per_step``: bytes that each of n workers sends in a step, on
        average: its share of :math:`8 P (n - 1) / n`, those of a ring all-reduce of P
        float32 gradients. :func:`wire_report` counts them in the compiled program.
      * ``exchange/share_of_float32`` and ``exchange/share_of_bfloat16``: these bytes
        over those of averaging gradients in that dtype.
      * ``exchange/agreement``: the median of :func:`momentum_agreement`, if the state
        has a momentum.
      * ``exchange/skipped_steps``: all that :func:`skip_not_finite` skipped, if the
        state has it.

    Raises:
      ValueError: if ``exchange`` is no exchange or ``params`` are empty or not floating
        point; when called, for a state without a leading axis of replicas, and if
        ``params`` had that axis.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> exchange, params = slamb_jax.Exchange("data"), jnp.ones((64, 100))
      >>> tx = slamb_jax.adamw(0.1, exchange)
      >>> metrics = slamb_jax.exchange_metrics(exchange, params)
      >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g), g)[1], axis_name="data")
      >>> numbers = metrics(step(jnp.ones((4, 64, 100))))
      >>> print(numbers["exchange/bytes_per_step"], numbers["exchange/agreement"])
      2040.0 2.0
    """
    elements, means = means_of(check_exchange(exchange), params)

    def metrics(state: chex.ArrayTree) -> dict[str, float]:
        n = check_replicas("state", state)
        of_float32 = share(elements, means, exchange.route, n)
        momenta = leaves_in(state, "mu").values()
        if n > 1 and elements == sum(x.size for x in momenta):
            raise ValueError(
                f"params must be one copy, got {elements} elements, as many as all {n} "
                "workers' momenta have: take slamb_jax.consolidate(params)"
            )
        out = {
            "exchange/bytes_per_step": of_float32 * 8 * elements * (n - 1) / n,
            "exchange/share_of_float32": of_float32,
            "exchange/share_of_bfloat16": 2 * of_float32,
        }
        if momenta:
            agreement = momentum_agreement(state).values()
            out["exchange/agreement"] = statistics.median(agreement)
        if skipped := leaves_in(state, "total_notfinite"):
            most = stacked(jnp.max, list(skipped.values())).max()
            out["exchange/skipped_steps"] = float(most)
        return out

    return metrics
