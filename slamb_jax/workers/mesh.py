"""Arrays on a mesh: put there, computed with there, and read from all processes."""

import contextlib
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slamb_jax._core.axes import as_tuple
from slamb_jax._core.checks import named_leaves
from slamb_jax._core.layout import state_specs
from slamb_jax.exchange.settings import Exchange, check_exchange


def workers_on(mesh: Mesh, exchange: Exchange) -> tuple[int, Mesh]:
    """The number of workers, and the mesh with Auto axes; raises for missing axes.

    With Explicit axes ``losses[0]`` is an error, and jax 0.10 gathers sharded models.
    Under ``jax.set_mesh`` the axes stay as they are, unless the model is sharded.
    """
    check_exchange(exchange)
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
    workers, local = as_tuple(exchange.axis_name), as_tuple(exchange.local_axis_name)
    if not workers:
        raise ValueError(
            "exchange must name the mesh axis of the workers, got axis_name=None: "
            f"slamb_jax.Exchange({mesh.axis_names[0]!r})"
        )
    named = {"axis_name": workers, "local_axis_name": local}
    for argument, axes in (named | {"param_specs": exchange.shard_axes}).items():
        if missing := [a for a in axes if a not in mesh.shape]:
            raise ValueError(
                f"{argument} of the exchange names {missing[0]!r}, which is not an "
                f"axis of the mesh: it has {', '.join(map(repr, mesh.axis_names))}"
            )
    is_set = jax.sharding.get_abstract_mesh().axis_names
    if exchange.param_specs is not None or not is_set:
        mesh = Mesh(mesh.devices, mesh.axis_names)
    return math.prod(mesh.shape[a] for a in workers), mesh


def check_replicas(name: str, tree: chex.ArrayTree, workers: int | None = None) -> int:
    """The number of replicas; raises unless all leaves have as many, or ``workers``."""
    n, like = workers or 0, ""
    for leaf, x in named_leaves(name, tree).items():
        shape = jnp.shape(x)
        if not n and shape:
            n, like = shape[0], f", as {leaf} has them"
        if not shape or not n or shape[0] != n:
            raise ValueError(
                f"{leaf} must have a leading axis of {n or 'its'} replicas, one for "
                f"each worker{like}, got shape {shape}: slamb_jax.replicate(tree, "
                "mesh, exchange) adds it to one copy, slamb_jax.checkpoint.resize("
                "tree, n) takes the state of other workers to n"
            )
    return n


def state_shardings(
    state: chex.ArrayTree, mesh: Mesh, exchange: Exchange, lead: int = 0
) -> chex.ArrayTree:
    """A sharding for each leaf: its replica axis over the workers, the rest by specs.

    ``lead`` is 1 if the leaves have the replica axis already. Raises for specs that fit
    no part of the state.
    """
    specs, axis = jax.tree.map(lambda _: PartitionSpec(), state), exchange.axis_name
    if exchange.param_specs is not None:
        specs = state_specs(state, exchange.param_specs, lead=lead)
    return jax.tree.map(lambda s: NamedSharding(mesh, PartitionSpec(axis, *s)), specs)


def using(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Computes on this mesh even where ``jax.set_mesh`` has set one of other types."""
    if mesh is None or not jax.sharding.get_abstract_mesh().axis_names:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def mesh_sharding(x: Any) -> NamedSharding | None:
    """The sharding of an array that lies on a mesh; None for any other leaf."""
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def computed(
    fun: Callable[[Any], jax.Array], leaves: Any, spec: PartitionSpec | None = None
) -> jax.Array:
    """``fun`` of the leaves, on the devices that hold them, sharded as in ``spec``.

    ``fun`` is jitted, and must be a function of a module, so that it is traced once.
    Without ``spec`` the result stays where it is computed.

    All devices are waited for: on CPU more than 32 programs in flight, as a tree has
    leaves, end in a deadlock of those that communicate.
    """
    meshes = [s.mesh for s in map(mesh_sharding, jax.tree.leaves(leaves)) if s]
    if not meshes:
        return jax.jit(fun)(leaves)
    mesh = Mesh(meshes[0].devices, meshes[0].axis_names)  # of Auto axes: see workers_on

    def moved(x: Any) -> Any:
        here = mesh_sharding(x)
        return jax.device_put(x, NamedSharding(mesh, here.spec)) if here else x

    with using(mesh):
        there = None if spec is None else NamedSharding(mesh, spec)
        jitted = jax.jit(fun, out_shardings=there)
        return jax.block_until_ready(jitted(jax.tree.map(moved, leaves)))


def replicated(fun: Callable[[Any], jax.Array], leaves: Any) -> jax.Array:
    """``fun`` of replicas, computed on all of their devices, and got from one."""
    out = computed(fun, leaves, PartitionSpec())
    return out.addressable_data(0) if mesh_sharding(out) else out


def stacked(of_leaf: Callable[[Any], jax.Array], leaves: Iterable[Any]) -> np.ndarray:
    """``of_leaf``, a function of a module, of each leaf's replicas; on the host.

    Leaf by leaf where they lie, since one program of all would take long to compile.
    The results are then communicated together.
    """
    return np.asarray(replicated(jnp.stack, [computed(of_leaf, x) for x in leaves]))


def device_put_global(x: Any, there: NamedSharding) -> Any:
    """Puts what every process knows on devices of all processes, if it is not there."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)
    if isinstance(x, jax.core.Tracer):
        return jax.device_put(x, there)
    here = mesh_sharding(x)
    if here and here.mesh == there.mesh and here.is_equivalent_to(there, x.ndim):
        return x
    if there.is_fully_addressable or (here and here.device_set == there.device_set):
        return jax.device_put(x, there)

    def put(array: Any) -> jax.Array:
        known = np.asarray(array)
        return jax.make_array_from_callback(known.shape, there, lambda i: known[i])

    return on_raw(put, x)


def gather(value: Any) -> list[Any]:
    """``value`` of each process, as JSON holds it."""
    text = json.dumps(value).encode()
    longest = int(multihost_utils.process_allgather(np.uint32(len(text))).max())
    padded = np.frombuffer(text.ljust(longest), np.uint8)
    return [json.loads(x.tobytes()) for x in multihost_utils.process_allgather(padded)]


def processes_of_workers(state: chex.ArrayTree) -> list[int]:
    """The process of each worker; raises for a worker of several."""
    n = check_replicas("like", state)
    first: Any = raw(jax.tree.leaves(state)[0]) if n else None
    if mesh_sharding(first) is None:
        return [jax.process_index()] * n
    pairs = {
        (worker, shard.device.process_index)
        for shard in first.global_shards
        for worker in range(n)[shard.index[0]]
    }
    if len(pairs) > n:
        raise ValueError(
            "the devices of a worker must be of one process, got these pairs of worker "
            f"and process: {sorted(pairs)}. Use slamb_jax.Checkpoints"
        )
    return [process for _, process in sorted(pairs)]


def own_replicas(x: Any) -> np.ndarray:
    """The replicas of this process's workers, on the host."""
    if getattr(x, "is_fully_addressable", True):
        return np.asarray(x)
    rows: dict[int, np.ndarray] = {}
    for shard in x.addressable_shards:
        part = np.asarray(shard.data)
        empty = np.empty((len(part), *x.shape[1:]), x.dtype)
        rows.setdefault(shard.index[0].start or 0, empty)[:, *shard.index[1:]] = part
    return np.concatenate([rows[r] for r in sorted(rows)])


def is_held(x: object) -> bool:
    """Whether a leaf is an array that has values now: it is not traced."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def is_key(x: object) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def raw(x: Any) -> Any:
    """The words of typed random keys; other leaves as they are."""
    return jax.random.key_data(x) if is_key(x) else x


def on_raw(fun: Callable[[Any], Any], x: Any) -> Any:
    """``fun`` of a leaf; for typed random keys, keys made of ``fun`` of their words."""
    impl = jax.random.key_impl(x) if is_key(x) else None
    return fun(x) if impl is None else jax.random.wrap_key_data(fun(raw(x)), impl=impl)
