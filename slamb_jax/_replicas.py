"""Replicas that drift apart: laid out on a mesh, stepped, and joined again."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slamb_jax._checks import check_apart, check_arrays, check_callable
from slamb_jax._collectives import tracked_axes, vary_over, widened, worker_index
from slamb_jax._layout import names_of
from slamb_jax._same import check_same_state
from slamb_jax._shards import specs_of

_WHOLE = PartitionSpec()


def replicate(
    tree: chex.ArrayTree, mesh: Mesh, axis_name: str, param_specs: Any = None
) -> chex.ArrayTree:
    """Gives every worker on the mesh its own copy of ``tree``, all the same.

    Each leaf gets a leading replica axis, as long as the mesh axis and sharded over
    it. Parameters under SLAMB differ between workers from one average to the next, so
    they are not replicated in jax's sense: they are n arrays in one.

    Args:
      tree: parameters, optimizer state, random keys: a tree of arrays (or numbers).
        With several processes, each passes the same values.
      mesh: the device mesh.
      axis_name: the mesh axis of the workers.
      param_specs: a tree of ``jax.sharding.PartitionSpec``, one for each parameter
        (None: not cut): every part of ``tree`` with the structure of this tree, as
        parameters and moments have, is cut over further axes of the mesh as it says.

    Returns:
      A tree like ``tree`` of arrays of shape ``(n, ...)``.

    Raises:
      ValueError: if the mesh has no axis of that name, for a leaf that is neither
        an array nor a number, and for specs that do not fit.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
      >>> slamb_jax.replicate({"w": jnp.ones(3)}, mesh, "data")["w"].shape
      (4, 3)
    """
    n = _workers(mesh, axis_name)

    def spread(x: Any, spec: PartitionSpec) -> jax.Array:
        if is_key(x):
            return _like_key(x, spread(jax.random.key_data(x), spec))
        sharding = NamedSharding(mesh, PartitionSpec(axis_name, *spec))
        if _is_cut(x):
            return _copies(n, sharding)(x)
        one = np.asarray(x, dtype=jnp.result_type(x))
        return _put(np.broadcast_to(one, (n, *one.shape)), sharding)

    check_arrays("tree", tree)
    return jax.tree.map(spread, tree, specs_of(tree, param_specs, mesh, axis_name))


def per_worker_step(
    step: Callable[..., tuple[Any, Any]],
    mesh: Mesh,
    axis_name: str,
    *,
    local_axis_name: str | None = None,
    param_specs: Any = None,
    check_vma: bool = True,
) -> Callable[..., tuple[Any, Any]]:
    """Turns a step as one worker sees it into a jitted step of all workers.

    Args:
      step: ``step(state, batch)`` or ``step(state, batch, key)``, returning the new
        state and what is to be reported. It sees one worker's state, one worker's
        share of the batch and that worker's own random key, and may use
        ``axis_name`` in collectives. It must take its gradient as if it were alone.
      mesh: the device mesh.
      axis_name: the mesh axis of the workers.
      local_axis_name: the mesh axis of the devices within a worker, if it is a group of
        several: the batch is split over both axes, each device has a key of its own and
        takes the gradient of its own share, and the state, one a group, is to come out
        the same on all devices of it, as it does from
        ``slamb(axis_name=..., local_axis_name=...)``.
      param_specs: as :func:`replicate` got them, for a model that does not fit on one
        device. ``step`` is written as if it did: how it computes on its shards is left
        to the compiler, and the state that it returns is cut as before.
      check_vma: as in ``jax.shard_map``. With True, gradients that were averaged
        behind the user's back are refused; False is for models whose kernels do not
        support the check.

    Returns:
      ``run(state, batch, key=None)``, jitted, with the ``lower`` of a jitted function.
      ``state`` is what :func:`replicate`
      returned, and is donated: use the one that comes back. The leaves of ``batch``
      have the workers' shares joined along their first axis. ``key`` is one random
      key, from which each worker gets its own. What ``step`` reports comes back with
      a leading axis of workers; nothing is exchanged for it.

    Raises:
      ValueError: if the mesh has no such axis; when called, if ``state`` was not
        replicated over it, a leaf of ``batch`` does not split evenly, or the new state
        might differ within a group.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
      >>> tx = slamb_jax.slamb(0.1, axis_name="data")
      >>> def step(state, batch):
      ...     params, opt_state = state
      ...     loss = lambda p: jnp.mean((batch @ p) ** 2)
      ...     value, grads = jax.value_and_grad(loss)(params)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return (optax.apply_updates(params, updates), opt_state), value
      >>> params = jnp.ones(3)
      >>> state = slamb_jax.replicate((params, tx.init(params)), mesh, "data")
      >>> run = slamb_jax.per_worker_step(step, mesh, "data")
      >>> state, losses = run(state, jnp.ones((8, 3)))
      >>> print(losses)
      [9. 9. 9. 9.]

      A model in two halves, on each of four workers:

      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((4, 2), ("data", "model"))
      >>> specs = {"up": P(None, "model"), "down": P("model", None)}
      >>> tx = slamb_jax.slamb(0.1, axis_name="data", param_specs=specs)
      >>> params = {"up": jnp.ones((3, 8)), "down": jnp.ones((8, 3))}
      >>> start = (params, tx.init(params))
      >>> state = slamb_jax.replicate(start, mesh, "data", specs)
      >>> state[0]["up"].addressable_shards[0].data.shape
      (1, 3, 4)
      >>> run = slamb_jax.per_worker_step(step, mesh, "data", param_specs=specs)
    """
    check_callable("step", step)
    n = _workers(mesh, axis_name)
    split, same = PartitionSpec(axis_name), PartitionSpec()
    axes: Any = axis_name
    if local_axis_name is not None:
        if param_specs is not None:
            raise ValueError(
                "param_specs and local_axis_name cannot both be given here, got "
                f"{param_specs!r} and {local_axis_name!r}: use jax.shard_map over all "
                "axes of the mesh, where slamb takes both"
            )
        check_apart(axis_name, local_axis_name)
        _workers(mesh, local_axis_name, "local_axis_name")
        axes = (axis_name, local_axis_name)
    shares = n * mesh.shape[local_axis_name] if local_axis_name else n
    each = PartitionSpec(axes)

    def one_worker(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        own = jax.tree.map(lambda x: jnp.squeeze(x, 0), state)
        keys = own_keys(key, axes)
        if local_axis_name is None:
            own, report = step(own, batch, *keys)
        else:
            own = _own_by_type(own, local_axis_name)
            own, report = check_same_state(step, own, (batch, *keys), local_axis_name)
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), (own, report))

    if param_specs is not None:
        # Not in the types: it is the compiler's, who else gathers (jax 0.10).
        mesh = Mesh(mesh.devices, mesh.axis_names)
    workers = jax.shard_map(
        one_worker,
        mesh=mesh,
        in_specs=(split, each, same),
        out_specs=each,
        check_vma=check_vma,
        **({} if param_specs is None else {"axis_names": {axis_name}}),
    )

    def groups(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        state, report = workers(state, batch, key)
        # The same on all devices of a group, as was checked: nothing moves.
        joined = jax.shard_map(
            lambda state: state,
            mesh=mesh,
            in_specs=each,
            out_specs=split,
            check_vma=False,
        )
        return joined(state), report

    def shardings(state: Any) -> Any:
        specs = specs_of(state, param_specs, mesh, axis_name, behind=1)
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, PartitionSpec(axis_name, *spec)), specs
        )

    def cut(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        new, report = workers(state, batch, key)
        return jax.lax.with_sharding_constraint(new, shardings(new)), report

    program = workers
    if local_axis_name is not None:
        program = groups
    if param_specs is not None:
        program = cut
    jitted = jax.jit(program, donate_argnums=0)

    def placed(state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
        check_leading(state, batch, n, shares)
        return (
            jax.tree.map(_place_one, state, shardings(state)),
            _place(batch, mesh, each),
            _place(key, mesh, same),
        )

    def run(state: Any, batch: Any, key: Any = None) -> tuple[Any, Any]:
        return jitted(*placed(state, batch, key))

    def lower(state: Any, batch: Any, key: Any = None) -> jax.stages.Lowered:
        return jitted.lower(*placed(state, batch, key))

    run.lower = lower  # type: ignore[attr-defined]
    return run


def _own_by_type(state: Any, local_axis_name: str) -> Any:
    """The state, with a type that varies over the axis: else jax.grad would sum."""
    axes = tracked_axes(local_axis_name)

    def own(x: Any) -> Any:
        if is_key(x):
            return _like_key(x, vary_over(jax.random.key_data(x), axes))
        return vary_over(x, axes)

    return jax.tree.map(own, state)


def own_keys(key: jax.Array | None, axis_name: Any) -> tuple[jax.Array, ...]:
    """The worker's own random key, as a step takes it: not at all without ``key``."""
    if key is None:
        return ()
    return (jax.random.fold_in(key, worker_index(axis_name)),)


def check_leading(state: Any, batch: Any, n: int, shares: int | None = None) -> None:
    """Raises unless ``state`` has n replicas and ``batch`` splits into n shares."""
    m = n if shares is None else shares
    _check_leading("state", state, lambda size: size == n, f"{n} replicas")
    _check_leading("batch", batch, lambda size: size % m == 0, f"a multiple of {m}")


def _place(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Puts what is not there yet where the step expects it."""
    there = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: _place_one(x, there), tree)


def _place_one(x: Any, there: NamedSharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(there, x.ndim):
        return x
    return _put(x, there)


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    """``x``, which all processes know, as an array on devices of all of them."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if is_key(x):
        return _like_key(x, _put(jax.random.key_data(x), sharding))
    known = np.asarray(x)
    return jax.make_array_from_callback(known.shape, sharding, lambda i: known[i])


def is_key(x: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _like_key(key: jax.Array, bits: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(key))


def consolidate(tree: chex.ArrayTree) -> chex.ArrayTree:
    """Joins the replicas into one copy, for evaluation and export.

    Floating-point leaves, BatchNorm statistics among them, become the mean over the
    leading replica axis, exactly the common value where all replicas agree; other
    leaves (counts, keys) are those of the first replica.

    Args:
      tree: a tree of arrays of shape ``(n, ...)``, as :func:`replicate` returned them
        or as they came out of ``vmap``.

    Returns:
      A tree of arrays without that axis: on one local device, or, if any leaf is cut
      over further axes of the mesh, all of them on the mesh, cut as they were.

    Raises:
      ValueError: for a leaf without a leading axis.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> print(slamb_jax.consolidate({"w": jnp.array([[1.0, 2.0], [3.0, 2.0]])})["w"])
      [2. 2.]
    """
    check_replicas("tree", tree)
    cut = any(_is_cut(x, behind=1) for x in jax.tree.leaves(tree))
    return jax.tree.map(_joined_in_place if cut else _joined_locally, tree)


def _joined_locally(x: Any) -> jax.Array:
    return local(everywhere(_join, x))


def _joined_in_place(x: Any) -> jax.Array:
    own = _mesh_sharding(x)
    if own is None:
        return _joined_locally(x)
    plain = Mesh(own.mesh.devices, own.mesh.axis_names)
    x = jax.device_put(x, NamedSharding(plain, own.spec))
    return _gathered(_join, plain, PartitionSpec(*own.spec[1:]))(x)


def _is_cut(x: Any, behind: int = 0) -> bool:
    """Whether an array is sharded along a dimension behind so many."""
    own = _mesh_sharding(x)
    return own is not None and bool(names_of(own.spec[behind:]))


@functools.lru_cache(maxsize=64)
def _copies(n: int, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """N copies of an array that no device has whole."""
    return jax.jit(
        lambda x: jnp.broadcast_to(x[None], (n, *x.shape)), out_shardings=sharding
    )


def everywhere(fun: Callable[[Any], jax.Array], leaves: Any) -> jax.Array:
    """``fun`` of a tree of arrays with replicas, known on all of their devices.

    ``fun`` is jitted, and is to be a function of a module, traced but once.
    """
    meshes = {s.mesh for s in map(_mesh_sharding, jax.tree.leaves(leaves)) if s}
    if not meshes:
        return jax.jit(fun)(leaves)
    (mesh, *others) = meshes
    if others:
        raise ValueError(f"all leaves must lie on one mesh, got {mesh} and {others[0]}")
    # Without sharding in types: the replica axis is about to go.
    plain = Mesh(mesh.devices, mesh.axis_names)

    def placed(x: Any) -> Any:
        own = _mesh_sharding(x)
        return jax.device_put(x, NamedSharding(plain, own.spec)) if own else x

    # Waited for on all devices: on CPU more than 32 programs in flight, as a tree has
    # leaves, end in a deadlock of those that exchange.
    return jax.block_until_ready(_gathered(fun, plain)(jax.tree.map(placed, leaves)))


@functools.lru_cache(maxsize=64)
def _gathered(
    fun: Callable[..., jax.Array], mesh: Mesh, spec: PartitionSpec = _WHOLE
) -> Callable[..., jax.Array]:
    return jax.jit(fun, out_shardings=NamedSharding(mesh, spec))


def _mesh_sharding(x: Any) -> NamedSharding | None:
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def local(x: jax.Array) -> jax.Array:
    """What each device has of ``x``, from the first of this process."""
    return x.addressable_data(0) if _mesh_sharding(x) else x


def _join(x: jax.Array) -> jax.Array:
    first = x[0]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return first
    wide = widened(x)
    return (wide[0] + jnp.mean(wide - wide[:1], axis=0)).astype(x.dtype)


def _workers(mesh: Mesh, axis_name: str, argument: str = "axis_name") -> int:
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
    if axis_name not in mesh.shape:
        raise ValueError(
            f"{argument}={axis_name!r} is not an axis of the mesh, which has "
            f"{', '.join(map(repr, mesh.axis_names))}"
        )
    return mesh.shape[axis_name]


def check_replicas(name: str, tree: Any) -> int:
    """The number of replicas of ``tree``; raises unless all leaves have as many."""
    sizes = {jnp.shape(x)[0] for x in jax.tree.leaves(tree) if jnp.ndim(x)}
    n = min(sizes, default=0)
    many = f"{n} replicas" if n and len(sizes) == 1 else "the same number of replicas"
    _check_leading(name, tree, lambda size: size == n and size > 0, many)
    return n


def _check_leading(
    name: str, tree: Any, good: Callable[[int], bool], expected: str
) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        shape = jnp.shape(x)
        if not shape or not good(shape[0]):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} must have a leading axis of "
                f"{expected}, got shape {shape}"
            )
