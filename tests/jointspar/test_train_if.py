"""The conditional backward pass: right under every mapping, and really skipped."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from slamb_jax import jointspar
from slamb_jax.wire.hlo import parse_hlo
from tests.close import assert_close
from tests.optimizers import random_tree
from tests.workers import MAPPINGS, over_workers, stack

NAMES = ("a", "b", "c")
WIDTH = 8


def dense(w, x):
    return jnp.tanh(x @ w)


def network(params, x, active=None, layer=dense, bottom=()):
    for i, name in enumerate(NAMES):
        below = None if bottom is None else NAMES[:i]
        x = jointspar.train_if(active, name, layer, below=below)(params[name], x)
    return jnp.sum(jnp.square(x))


def arrays(seed=0):
    """The parameters of :func:`network`, and a batch of five."""
    shapes = dict.fromkeys(NAMES, (WIDTH, WIDTH)) | {"x": (5, WIDTH)}
    params = random_tree(shapes, seed, scale=WIDTH**-0.5)
    return params, params.pop("x")


def flags(names):
    return {name: jnp.asarray(name in names) for name in NAMES}


def check_gradient(got, full, active):
    # Some leaves, biases before a normalization, are 0 but for rounding.
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(full))
    for name, want in full.items():
        want = want if name in active else jax.tree.map(jnp.zeros_like, want)
        assert_close(got[name], want, units=256, floor=largest)


SETS = [s for n in range(4) for s in itertools.combinations(NAMES, n)]


def convolution(w, x):
    """:func:`dense` in another form."""
    args = x[..., None], w.T[..., None], (1,), "SAME"
    y = lax.conv_general_dilated(*args, dimension_numbers=("NC0", "OI0", "NC0"))
    return jnp.tanh(y[..., 0])


@pytest.mark.parametrize(
    ("layer", "outside"),
    [
        (dense, lambda f: f),
        (convolution, lambda f: f),
        (jax.checkpoint(dense), lambda f: f),
        (jax.jit(dense), jax.checkpoint),
    ],
    ids=["plain", "convolution", "remat inside", "remat outside"],
)
def test_active_layers_have_the_gradient_and_others_none(layer, outside):
    params, x = arrays()
    grad = jax.jit(jax.grad(outside(functools.partial(network, layer=layer))))
    full = jax.jit(jax.grad(network))(params, x)
    for active in SETS:
        check_gradient(grad(params, x, flags(active)), full, active)
    assert grad._cache_size() == 1


def test_the_gradient_of_the_inputs():
    """All the way down if something below is always trained; else it ends."""
    params, x = arrays()
    full = jax.jit(jax.grad(network, 1))(params, x)
    through = jax.jit(jax.grad(functools.partial(network, bottom=None), 1))
    ends = jax.jit(jax.grad(network, 1))
    for active in SETS:
        assert_close(through(params, x, flags(active)), full)
        assert not ends(params, x, flags(active)).any()


def test_integers_keys_trees_and_keywords_pass_through():
    def layer(params, x, rows, key, *, scale):
        w, order = params["w"], params["order"]
        y = (x["x"] @ w)[rows] * scale + jax.random.normal(key, ())
        return {"y": y[:, order], "rows": rows}

    params = {"w": arrays()[0]["a"], "order": jnp.arange(WIDTH)[::-1]}
    x, rows, key = {"x": arrays()[1]}, jnp.array([2, 0]), jax.random.key(0)

    def loss(w, active):
        run = jointspar.train_if(active, "a", layer)
        out = run(params | {"w": w}, x, rows, key, scale=2.0)
        return jnp.sum(out["y"] ** 2) + jnp.sum(out["rows"]).astype(jnp.float32)

    both = jax.jit(jax.value_and_grad(loss))
    want, full = both(params["w"], None)
    for active in ("a", ""):
        value, got = both(params["w"], flags(active))
        assert_close(value, want)
        check_gradient({"a": got}, {"a": full}, active)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_every_mapping(mapping):
    """Also under vmap, with active sets that differ: right, though not faster."""
    n, params, full = 4, arrays()[0], jax.jit(jax.grad(network))
    x = jnp.stack([arrays(seed)[1] for seed in range(n)])
    sets = [("a",), ("b", "c"), (), NAMES]
    active = jax.tree.map(lambda *x: jnp.stack(x), *map(flags, sets))
    got = over_workers(jax.grad(network), mapping, n)(stack(params, n), x, active)
    for i, names in enumerate(sets):
        check_gradient({k: g[i] for k, g in got.items()}, full(params, x[i]), names)


def products(compiled):
    """How many matrix products a program runs always, and in each of its branches."""
    module = parse_hlo(compiled.as_text())
    bodies = {name: body.values() for name, body in module.computations.items()}

    def plain(name):
        called = [x.called for x in bodies[name] if x.opcode in ("fusion", "call")]
        inside = sum(map(plain, itertools.chain(*called)))
        return inside + sum(x.opcode == "dot" for x in bodies[name])

    def conditionals(name):
        """For each conditional of a computation, the products of each way through."""
        found = [x.called for x in bodies[name] if x.opcode == "conditional"]
        return sorted(sorted(itertools.chain(*map(paths, x))) for x in found)

    def paths(name):
        ways = itertools.product(*conditionals(name))
        return [plain(name) + sum(way) for way in ways]

    return plain(module.entry), conditionals(module.entry)


def test_the_compiled_program_skips_inactive_layers():
    """Neither gradient, one of them or both; the lowest layer has only weights."""

    def of(loss):
        lowered = jax.jit(jax.grad(loss)).lower(*arrays(), flags(NAMES))
        return products(lowered.compile())

    layer = [0, 1, 1, 2]
    assert of(network) == (3, [[0, 1], layer, layer])
    through = functools.partial(network, bottom=None)
    assert of(through) == (3, [[0, 1], [1, 2], [1, 2]])
    _, branches = of(functools.partial(network, layer=jax.checkpoint(dense)))
    assert [branch[0] for branch in branches] == [0, 0, 0]  # computed only if needed


def check_module(loss, params):
    """``loss(params, active)`` also returns what the module changed of its state."""
    both = jax.jit(jax.value_and_grad(loss, has_aux=True))
    want, full = both(params, None)
    assert jax.tree.leaves(want[1])
    for active in (("a",), ("b", "c"), ()):
        got, grads = both(params, flags(active))
        assert_close(got, want)
        check_gradient(grads, full, active)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.BatchNorm(use_running_average=False)(nn.Dense(WIDTH)(x))
        return x + nn.Dropout(0.3, deterministic=False)(nn.relu(h))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, active=None):
        for i, name in enumerate(NAMES):
            block = (nn.remat(Block) if name == "b" else Block)(name=name)
            x = jointspar.train_if(active, name, block, below=NAMES[:i])(x)
        return x


@pytest.mark.usefixtures("standard_promotion")
def test_linen_modules_with_statistics_and_dropout():
    net, x = Net(), arrays()[1]
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(net.init)(keys, x, flags(NAMES))
    plain = jax.eval_shape(net.init, keys, x)
    assert jax.tree.structure(variables) == jax.tree.structure(plain)

    def loss(params, active):
        given = variables | {"params": params}
        out, new = net.apply(given, x, active, mutable=["batch_stats"], rngs=keys)
        return jnp.mean(jnp.square(out - 1)), new["batch_stats"]

    check_module(loss, variables["params"])


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Sequential(
            nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs),
            nnx.Dropout(0.3, rngs=rngs),
        )  # fmt: skip
        self.b = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.c = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x, active=None):
        for i, name in enumerate(NAMES):
            layer, below = getattr(self, name), NAMES[:i]
            x = jnp.tanh(jointspar.train_if(active, name, layer, below=below)(x))
        return x


@pytest.mark.usefixtures("standard_promotion")
def test_nnx_modules_with_statistics_and_dropout():
    graph, params, rest = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, ...)
    x = arrays()[1]

    def loss(params, active):
        net = nnx.merge(graph, params, rest, copy=True)
        value = jnp.mean(jnp.square(net(x, active) - 1))
        return value, nnx.state(net, nnx.BatchStat)

    check_module(loss, params)
