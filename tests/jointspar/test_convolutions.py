"""Convolutions in a branch: the same numbers, in the order that a CPU runs fast."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from slamb_jax import jointspar
from tests.close import assert_close
from tests.compiled import compile_optimized
from tests.workers import over_workers

CASES = {
    "plain": ((2, 8, 8, 3), (3, 3, 3, 4), {}),
    "stride": ((2, 9, 8, 3), (3, 2, 3, 4), {"window_strides": (2, 3)}),
    "dilated": ((2, 9, 9, 3), (3, 3, 3, 4), {"rhs_dilation": (2, 2)}),
    "grouped": ((2, 8, 8, 6), (3, 3, 2, 9), {"feature_group_count": 3}),
    "one dimension": ((2, 9, 3), (3, 3, 4), {}),
    "three dimensions": ((1, 4, 5, 6, 2), (2, 2, 2, 2, 3), {}),
}
FAST = {"b0f_0io->b0f", "b01f_01io->b01f", "b012f_012io->b012f"}


def layer_of(rank, settings=()):
    settings = {"window_strides": (1,) * rank, "padding": "SAME"} | dict(settings)
    space = "012"[:rank]
    names = (f"N{space}C", f"{space}IO", f"N{space}C")

    @jax.jit  # a call, within which convolutions are found
    def layer(w, x):
        y = lax.conv_general_dilated(x, w, dimension_numbers=names, **settings)
        return jnp.tanh(y + jnp.float32(1))

    return layer


def gradients(layer, w, x, on):
    def loss(w, x):
        y = jointspar.train_if({"a": on, "b": on}, "a", layer)(w, x)
        return jnp.sum(jnp.sin(y))

    return jax.grad(loss, argnums=(0, 1))(w, x)


def plain_gradients(layer, w, x):
    return jax.grad(lambda *a: jnp.sum(jnp.sin(layer(*a))), argnums=(0, 1))(w, x)


def normal(*shapes):
    return [jax.random.normal(jax.random.key(i), x) for i, x in enumerate(shapes)]


@pytest.mark.parametrize(
    ("name", "remat"), [*((name, False) for name in CASES), ("plain", True)]
)
def test_gradients_are_those_of_the_layer(name, remat):
    of_x, of_w, settings = CASES[name]
    w, x = normal(of_w, of_x)
    layer = layer_of(len(of_x) - 2, settings)
    layer = jax.checkpoint(layer) if remat else layer
    jitted = jax.jit(functools.partial(gradients, layer))
    compiled = compile_optimized(jitted.lower(w, x, jnp.array(True)))
    want = jax.jit(functools.partial(plain_gradients, layer))(w, x)
    assert_close(compiled(w, x, jnp.array(True)), want)
    assert not compiled(w, x, jnp.array(False))[0].any()
    orders = re.findall(r" convolution\(.*dim_labels=([^ ,\n]+)", compiled.as_text())
    assert orders
    assert "feature_group_count" in settings or set(orders) <= FAST  # XLA's own


def test_other_platforms_run_the_layers_own_convolutions():
    w, x = normal((3, 3, 3, 4), (2, 8, 8, 3))
    layer = layer_of(2)

    def convolutions(fun, platform, *args):
        lowered = jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,))
        return set(re.findall(r"dim_numbers = (\[.*?->\[.*?\])", lowered.as_text()))

    wrapped = functools.partial(gradients, layer)
    plain = functools.partial(plain_gradients, layer)
    on = jnp.array(True)
    assert convolutions(wrapped, "tpu", w, x, on) == convolutions(plain, "tpu", w, x)
    assert len(convolutions(plain, "tpu", w, x)) > 1
    assert len(convolutions(wrapped, "cpu", w, x, on)) == 1


@pytest.mark.parametrize("mapping", ["vmap", "shard_map", "shard_map_unchecked"])
def test_on_many_workers(mapping):
    layer, on = layer_of(2), jnp.array([True, False, True, False])
    w, x = normal((4, 3, 3, 3, 4), (4, 2, 6, 6, 3))
    got, _ = over_workers(functools.partial(gradients, layer), mapping, 4)(w, x, on)
    want, _ = jax.jit(jax.vmap(functools.partial(plain_gradients, layer)))(w, x)
    assert_close(got[::2], want[::2])
    assert not got[1::2].any()


def test_convolutions_in_a_loop_keep_their_order():
    w, x = normal((3, 3, 2, 2), (1, 5, 5, 2))
    once = layer_of(2)

    def layer(w, x):
        return lax.scan(lambda x, _: (once(w, x), None), x, length=3)[0]

    got = jax.jit(functools.partial(gradients, layer))(w, x, jnp.array(True))
    want = jax.jit(functools.partial(plain_gradients, layer))(w, x)
    assert_close(got, want)
