"""Steps compiled for chips that are not there, small; where libtpu is installed."""

import jax
import jax.numpy as jnp
import pytest

import slamb_jax

pytest.importorskip("libtpu")
from benchmarks import chips

SHAPES = {"w": (1024, 1024), "deep": (3, 3, 128, 128), "b": (1024,), "scale": ()}


@pytest.mark.parametrize(("topology", "slices"), [("v5p:2x2x1", 1), ("v5e:2x4", 2)])
def test_wire_and_memory_of_compiled_steps(topology, slices):
    mesh = chips.mesh_of(topology, slices)
    n = mesh.size
    with jax.numpy_dtype_promotion("standard"):  # optax.lamb needs it
        steps = {m: chips.compile_step(m, SHAPES, mesh) for m in ("lamb", "slamb")}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}
    d = sum(x.size for x in params.values())
    ask = {"step_seconds": 1.0, "optimizer_seconds": (1.0, 1.0), "sync_every": None}
    advice = slamb_jax.advise(params, slamb_jax.Network(n, 1e9), **ask)
    for name, step in steps.items():
        assert step.state_bytes > 4 * 4 * d
        assert step.temporary_bytes > 0
        inside, between = (
            step.sent(between_slices=b, conditional=False) for b in (False, True)
        )
        assert (between > 0) == (slices > 1)
        if slices == 1:
            sent = getattr(advice, name).bytes_per_step
            assert inside == pytest.approx(sent, rel=0.01)
    if slices > 1:  # each chip takes its share of the array to the other slices
        share = 2 * (slices - 1) / slices * 4 * d / (n / slices)
        sent = steps["lamb"].sent(between_slices=True, conditional=False)
        assert sent == pytest.approx(share, rel=0.05)
