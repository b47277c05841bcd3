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

CASES = {
    "plain": ((2, 8, 8, 3), (3, 3, 3, 4), {}),
    "stride": ((2, 9, 8, 3), (3, 2, 3, 4), {"window_strides": (2, 3)}),
    "dilated": ((2, 9, 9, 3), (3, 3, 3, 4), {"rhs_dilation": (2, 2)}),
    "grouped": ((2, 8, 8, 6), (3, 3, 2, 9), {"feature_group_count": 3}),
    "one dimension": ((2, 9, 3), (3, 3, 4), {}),
    "three dimensions": ((1, 4, 5, 6, 2), (2, 2, 2, 2, 3), {}),
    "remat": ((2, 8, 8, 3), (3, 3, 3, 4), {}),
    "loop": ((1, 5, 5, 2), (3, 3, 2, 2), {}),
}
FAST = {"b0f_0io->b0f", "b01f_01io->b01f", "b012f_012io->b012f"}


def layer_of(name):
    """A layer of the case, and its weights and inputs."""
    of_x, of_w, settings = CASES[name]
    space = "012"[: len(of_x) - 2]
    settings = {"window_strides": (1,) * len(space), "padding": "SAME"} | settings
    names = (f"N{space}C", f"{space}IO", f"N{space}C")

    @jax.jit  # a call, within which convolutions are found
    def layer(w, x):
        y = lax.conv_general_dilated(x, w, dimension_numbers=names, **settings)
        return jnp.tanh(y + jnp.float32(1))

    def thrice(w, x):
        return lax.scan(lambda x, _: (layer(w, x), None), x, length=3)[0]

    wrapped = {"remat": jax.checkpoint(layer), "loop": thrice}.get(name, layer)
    normal = jax.random.normal
    return wrapped, normal(jax.random.key(0), of_w), normal(jax.random.key(1), of_x)


def gradients(layer, w, x, on=None):
    def loss(w, x):
        active = None if on is None else {"a": on, "b": on}
        return jnp.sum(jnp.sin(jointspar.train_if(active, "a", layer)(w, x)))

    return jax.grad(loss, argnums=(0, 1))(w, x)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_layer(name):
    layer, w, x = layer_of(name)
    jitted = jax.jit(functools.partial(gradients, layer))
    on = jnp.array(True)
    compiled = compile_optimized(jitted.lower(w, x, on))
    assert_close(compiled(w, x, on), jitted(w, x))
    assert not compiled(w, x, jnp.array(False))[0].any()
    orders = re.findall(r" convolution\(.*dim_labels=([^ ,\n]+)", compiled.as_text())
    assert orders
    assert name == "grouped" or set(orders) <= FAST  # XLA's own


def test_other_platforms_run_the_layers_own_convolutions():
    layer, *args = layer_of("plain")

    def convolutions(platform, *args):
        traced = jax.jit(functools.partial(gradients, layer)).trace(*args)
        lowered = traced.lower(lowering_platforms=(platform,))
        return set(re.findall(r"dim_numbers = (\[.*?->\[.*?\])", lowered.as_text()))

    on = jnp.array(True)
    assert convolutions("tpu", *args, on) == convolutions("tpu", *args)
    assert len(convolutions("tpu", *args)) > 1
    assert len(convolutions("cpu", *args, on)) == 1
