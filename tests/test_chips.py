"""Steps compiled for chips that are not there, small; where libtpu is installed."""

import pytest

import slamb_jax
from tests.optimizers import standard_promotion

pytest.importorskip("libtpu")
from benchmarks import chips

SHAPES = {"w": (1024, 1024), "deep": (3, 3, 128, 128), "b": (1024,), "scale": ()}


@pytest.mark.long
@pytest.mark.parametrize(("topology", "slices"), [("v5p:2x2x1", 1), ("v5e:2x4", 2)])
def test_a_compiled_step_sends_what_was_advised(topology: str, slices: int) -> None:
    mesh = chips.mesh_of(topology, slices)
    n = mesh.size
    with standard_promotion():  # optax.lamb needs it
        steps = {m: chips.compile_step(m, SHAPES, mesh) for m in ("lamb", "slamb")}
    params = chips.abstract(SHAPES)
    d = sum(x.size for x in params.values())
    exchange = slamb_jax.Exchange.paper(chips.AXIS, sync_every=None)
    seconds = {"step_seconds": 1.0, "update_seconds": (1.0, 1.0)}
    network = slamb_jax.Network(n, 1e9)
    advice = slamb_jax.advise(params, network, exchange, **seconds)
    for name, step in steps.items():
        assert step.state_bytes > 4 * 4 * d
        assert step.temporary_bytes > 0
        inside, between = (
            step.sent(between_slices=b, conditional=False) for b in (False, True)
        )
        assert (between > 0) == (slices > 1)
        if slices == 1:
            cost = advice.dense if name == "lamb" else advice.exchanging
            sent = cost.bytes_per_step
            assert inside == pytest.approx(sent, rel=0.01)
    if slices > 1:  # each chip sends its share of the array to the other slices
        share = 2 * (slices - 1) / slices * 4 * d / (n / slices)
        sent = steps["lamb"].sent(between_slices=True, conditional=False)
        assert sent == pytest.approx(share, rel=0.05)
