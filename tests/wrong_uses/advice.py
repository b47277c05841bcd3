"""Wrong uses of the advisor and of the wire report."""

from functools import partial

import jax
import jax.numpy as jnp

import slamb_jax
from slamb_jax.wire import WireReport
from tests.workers import P, mesh_of
from tests.wrong_uses.common import INF, NAN, bad, of

NETWORK = slamb_jax.Network(workers=8, link=1e9)
WEIGHT = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}


def network(**settings):
    return slamb_jax.Network(**({"workers": 8, "link": 1e9} | settings))


def advise(params=1e6, network=NETWORK, exchange=None, **settings):
    exchange = slamb_jax.Exchange("data") if exchange is None else exchange
    settings = {"step_seconds": 1.0, "update_seconds": (0.1, 0.1)} | settings
    return slamb_jax.advise(params, network, exchange, **settings)


GROUPS = slamb_jax.Exchange("data", local_axis_name="x")
WIDE = slamb_jax.Exchange("data", payload="uniform8")
SHARDED = slamb_jax.Exchange("data", param_specs=P("model"))
LOWERED = jax.jit(jnp.sin).lower(1.0).as_text()  # StableHLO

ADVICE = [
    *bad(network, "workers", 1, 8.0, wanted="integer of at least 2"),
    *bad(network, "link", 0, NAN, INF, "10Gbit"),
    *bad(network, "latency", -1e-6, INF),
    *bad(network, "local_link", -1),
    *bad(network, "workers_per_node", 0),
    (of(network, workers_per_node=3), r"workers must .*\(workers=8.*_node=3"),
    (of(network, workers_per_node=8), "local_link must be given .*local_link=inf"),
    *bad(partial(NETWORK.seconds, payload_bytes=8), "kind", "broadcast"),
    *bad(partial(NETWORK.seconds, payload_bytes=8), "kind", "collective-broadcast"),
    *bad(partial(NETWORK.seconds, "all-reduce"), "payload_bytes", -8),
    *bad(advise, "network", "network", wanted="a slamb_jax.Network"),
    (of(advise, exchange="data"), r"Exchange, got 'data': .*Exchange\('data'\)"),
    (of(advise, exchange=slamb_jax.Exchange()), "exchange must have an axis_name"),
    (of(advise, exchange=GROUPS), "network must have .*'x', got .*workers_per_node=1"),
    (of(advise, WEIGHT, exchange=SHARDED), r"params\['w'\] must .*'model'"),
    *bad(advise, "params", 0, NAN, True),
    (of(advise, {}), "params must have elements"),
    (of(advise, {"n": jnp.arange(3)}), r"params .*int32 at params\['n'\]"),
    *bad(advise, "step_seconds", 0.0, None),
    (of(advise, update_seconds=(0.1, -1)), r"update_seconds \(exchanging\) .*-1"),
    *bad(advise, "update_seconds", 3, wanted="a pair"),
    *bad(advise, "budget", 0, NAN, "5%", wanted=r"\(0.0, 1.0\]"),
    (of(advise, budget=5), r"budget must be in \(0.0, 1.0\], got 5"),
    (of(advise, budget=1e-4), "budget must be at least .*0.0001: where all"),
    (of(advise, exchange=WIDE, budget=0.1), "budget chooses the payload.*'uniform8'"),
    (of(WireReport(()).bytes_over, mesh_of(2), "model"), "mesh .* the axis 'model'"),
    (of(WireReport(()).share, WireReport(())), "dense must send something"),
    *bad(slamb_jax.wire_report, "program", "no program", 3),
    (of(slamb_jax.wire_report, LOWERED), r"program must be compiled.*\.compile\(\)"),
]
