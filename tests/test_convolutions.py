"""Convolutions in a branch: the numbers they had, in the order that is quick."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import slamb_jax
from tests.workers import AXIS, P, mesh_of

CASES = {
    "plain": ((2, 8, 8, 3), (3, 3, 3, 4), {}),
    "stride": ((2, 9, 8, 3), (3, 2, 3, 4), {"window_strides": (2, 3)}),
    "dilated": ((2, 9, 9, 3), (3, 3, 3, 4), {"rhs_dilation": (2, 2)}),
    "grouped": ((2, 8, 8, 6), (3, 3, 2, 9), {"feature_group_count": 3}),
    "depthwise": ((2, 8, 8, 4), (3, 3, 1, 4), {"feature_group_count": 4}),
    "one dimension": ((2, 9, 3), (3, 3, 4), {}),
    "three dimensions": ((1, 4, 5, 6, 2), (2, 2, 2, 2, 3), {}),
}
ORDERED = {"b0f_0io->b0f", "b01f_01io->b01f", "b012f_012io->b012f"}


def layer_of(rank, settings):
    settings = {"window_strides": (1,) * rank, "padding": "SAME"} | settings
    space = "012"[:rank]
    names = (f"N{space}C", f"{space}IO", f"N{space}C")

    @jax.jit  # looked into
    def layer(w, x):
        y = lax.conv_general_dilated(x, w, dimension_numbers=names, **settings)
        return jnp.tanh(y + jnp.float32(1))

    return layer


def gradients(layer, w, x, on):
    def loss(w, x):
        active = {"a": jnp.asarray(on), "b": jnp.asarray(on)}
        y = slamb_jax.train_if(active, "a", layer)(w, x)
        return jnp.sum(jnp.sin(y))

    return jax.grad(loss, argnums=(0, 1))(w, x)


@pytest.mark.parametrize(
    ("name", "remat"), [*((name, False) for name in CASES), ("plain", True)]
)
def test_gradients_are_those_of_the_layer(name, remat):
    of_x, of_w, settings = CASES[name]
    x = jax.random.normal(jax.random.key(0), of_x)
    w = jax.random.normal(jax.random.key(1), of_w)
    layer = layer_of(len(of_x) - 2, settings)
    layer = jax.checkpoint(layer) if remat else layer
    want = jax.grad(lambda *a: jnp.sum(jnp.sin(layer(*a))), argnums=(0, 1))(w, x)
    jitted = jax.jit(lambda w, x, on: gradients(layer, w, x, on))
    compiled = jitted.lower(w, x, True).compile()
    for a, b in zip(compiled(w, x, True), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    orders = re.findall(r" convolution\(.*dim_labels=([^ ,\n]+)", compiled.as_text())
    assert orders
    assert "feature_group_count" in settings or set(orders) <= ORDERED  # XLA's own
    assert not compiled(w, x, False)[0].any()


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map(check_vma):
    layer = layer_of(2, {})
    x = jax.random.normal(jax.random.key(0), (4, 2, 6, 6, 3))
    w = jax.random.normal(jax.random.key(1), (4, 3, 3, 3, 4))
    each = jax.shard_map(
        lambda w, x, on: jax.tree.map(
            lambda g: g[None], gradients(layer, w[0], x[0], on[0])
        ),
        mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=check_vma,
    )  # fmt: skip
    on = jnp.array([True, False, True, False])
    got = jax.jit(each)(w, x, on)
    loss = jax.vmap(lambda w, x: jnp.sum(jnp.sin(layer(w, x))))
    want = jax.grad(lambda w: loss(w, x).sum())(w)
    np.testing.assert_allclose(got[0][::2], want[::2], rtol=1e-5, atol=1e-5)
    assert not got[0][1::2].any()


def test_in_a_loop_they_are_let_alone():
    w = jnp.ones((3, 3, 2, 2)) / 9
    x = jax.random.normal(jax.random.key(0), (1, 5, 5, 2))
    once = layer_of(2, {})

    def layer(w, x):
        return lax.scan(lambda x, _: (once(w, x), None), x, length=3)[0]

    want = jax.grad(lambda w: jnp.sum(jnp.sin(layer(w, x))))(w)
    got = jax.jit(lambda: gradients(layer, w, x, True))()[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
