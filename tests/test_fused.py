"""The optimizer's one transformation against the chain of links that it stands for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests.workers import AXIS, MAPPINGS, random_tree, train

SHAPES = {
    "w": (12, 16),
    "b": (16,),
    "conv": (2, 3, 4, 5),
    "scale": (),
    "big": (300, 256),
}
N = 3


def chain(selection, rate, form, weight_decay, mask, mu_dtype, b3=0.7):
    shared = {"axis_name": AXIS}
    return optax.chain(
        slamb_jax.mask_momentum(
            slamb_jax.randk_compress_with_error_feedback(
                selection, keep_residual=False, **shared
            ),
            form=form,
            mu_dtype=mu_dtype,
        ),
        slamb_jax.layerwise_trust_ratio(
            selection, b3, weight_decay=weight_decay, mask=mask, form=form, **shared
        ),
        slamb_jax.elementwise_rescale(selection, b3, **shared),
        optax.scale_by_learning_rate(rate),
        slamb_jax.average_parameters_every(3, AXIS),
    )


@pytest.mark.parametrize(
    ("form", "weight_decay", "name", "dtype"),
    [
        (form, decay, "strided", dtype)
        for form in ("sum", "product")
        for decay in (0.0, 0.1)
        for dtype in ("float32", "bfloat16")
    ]
    + [("sum", 0.1, "bernoulli", "float32"), ("product", 0.1, "bernoulli", "bfloat16")],
)
def test_equals_the_chain_of_its_links(form, weight_decay, name, dtype):
    if name == "strided":
        shapes, selection = SHAPES, slamb_jax.Strided(0.25, 20)
    else:  # finds ages step by step: small leaves only
        selection = slamb_jax.Bernoulli(0.25, 20)
        shapes = {n: s for n, s in SHAPES.items() if n != "big"}
    mask = {name: name != "conv" for name in shapes}
    params = jax.tree.map(lambda x: x.astype(dtype), random_tree(shapes, 99))
    grads = [
        jax.tree.map(lambda x: x.astype(dtype), random_tree(shapes, t, N))
        for t in range(5)
    ]
    mu_dtype = None if dtype == "float32" else dtype
    tx = slamb_jax.slamb(
        0.01, axis_name=AXIS, selection=selection, form=form, b3=0.7, mask=mask,
        weight_decay=weight_decay, sync_every=3, mu_dtype=mu_dtype,
    )  # fmt: skip
    links = chain(selection, 0.01, form, weight_decay, mask, mu_dtype)
    got, want = (train(t, params, grads, "vmap") for t in (tx, links))
    assert jax.tree.structure(got[0][1]) == jax.tree.structure(want[0][1])
    # In 16 bits the links round u between them, and the parameters round in the end.
    tolerance = 1e-6 if dtype == "float32" else 0.03
    for a, b in zip(got, want, strict=True):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(
                x.astype(np.float32),
                y.astype(np.float32),
                rtol=tolerance,
                atol=tolerance,
            ),
            a,
            b,
        )


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_equals_the_chain_under_every_mapping(mapping):
    selection = slamb_jax.Strided(0.25, 20)
    params, grads = (
        random_tree(SHAPES, 99),
        [random_tree(SHAPES, t, N) for t in range(4)],
    )
    tx = slamb_jax.slamb(
        0.01, axis_name=AXIS, selection=selection, b3=0.7, sync_every=3
    )
    links = chain(selection, 0.01, "sum", 0.0, None, None)
    for a, b in zip(
        train(tx, params, grads, mapping),
        train(links, params, grads, mapping),
        strict=True,
    ):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-6), a, b)


def test_keeps_no_direction_in_memory():
    """Beyond what travels, the step holds no copy of a leaf (donated buffers)."""
    params = {str(i): jnp.zeros((1024, 1024)) for i in range(4)}
    tx = slamb_jax.slamb(0.01)

    def step(carry, grads):
        updates, state = tx.update(grads, carry[1], carry[0])
        return optax.apply_updates(carry[0], updates), state

    compiled = jax.jit(step, donate_argnums=0).lower((params, tx.init(params)), params)
    temporary = compiled.compile().memory_analysis().temp_size_in_bytes
    leaf = params["0"].nbytes
    allowed = 1 if jax.__version_info__ >= (0, 10) else 4 * 2
    assert temporary < (allowed + 0.4) * leaf
