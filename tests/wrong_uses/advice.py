"""Wrong uses of the advisor and of the wire report."""

import jax
import jax.numpy as jnp

import slamb_jax
from slamb_jax.wire import WireReport
from tests.workers import P, mesh_of
from tests.wrong_uses.common import INF, NAN, of

NETWORK = slamb_jax.Network(workers=8, link=1e9)
WEIGHT = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}


def network(**settings):
    return of(slamb_jax.Network, **({"workers": 8, "link": 1e9} | settings))


def advise(params=1e6, network=NETWORK, exchange=None, **settings):
    exchange = slamb_jax.Exchange("data") if exchange is None else exchange
    settings = {"step_seconds": 1.0, "optimizer_seconds": (0.1, 0.1)} | settings
    return of(slamb_jax.advise, params, network, exchange, **settings)


def groups(**settings):
    return slamb_jax.Exchange("data", local_axis_name="x", **settings)


ADVICE = [
    (network(workers=1), "workers must be an integer of at least 2, got 1"),
    (network(workers=8.0), "workers .*8.0"),
    (network(link=0), "link .*0"),
    (network(link=NAN), "link .*nan"),
    (network(link=INF), "link .*inf"),
    (network(link="10Gbit"), "link .*'10Gbit'"),
    (network(latency=-1e-6), "latency .*-1e-06"),
    (network(latency=INF), "latency .*inf"),
    (network(local_link=-1), "local_link .*-1"),
    (network(workers_per_node=0), "workers_per_node .*0"),
    (network(workers_per_node=3), "multiple of workers_per_node, got 8 and 3"),
    (network(workers_per_node=8), "local_link must be given .* 8 workers .*inf"),
    (of(NETWORK.seconds, "broadcast", 8), "kind .*'broadcast'"),
    (of(NETWORK.seconds, "collective-broadcast", 8), "kind .*'collective-broadcast'"),
    (of(NETWORK.seconds, "all-reduce", -8), "payload_bytes .*-8"),
    (advise(network="network"), "network must be a slamb_jax.Network, got 'network'"),
    (advise(exchange="data"), r"slamb_jax.Exchange, got 'data': .*Exchange\('data'\)"),
    (advise(exchange=slamb_jax.Exchange()), "exchange must have an axis_name"),
    (advise(exchange=groups()), "network must have .*'x', got .*workers_per_node=1"),
    (
        advise(WEIGHT, exchange=slamb_jax.Exchange("data", param_specs=P("model"))),
        r"NamedSharding .*'model'.* at params\['w'\]",
    ),
    (advise(0), "params .*0"),
    (advise(NAN), "params .*nan"),
    (advise(True), "params .*True"),
    (advise({}), "params must have elements"),
    (advise({"n": jnp.arange(3)}), r"params must be real .*int32 at params\['n'\]"),
    (advise(step_seconds=0.0), "step_seconds .*0.0"),
    (advise(step_seconds=None), "step_seconds .*None"),
    (advise(mu_dtype="int8"), "mu_dtype .*'int8'"),
    (advise(optimizer_seconds=(0.1, -1)), r"optimizer_seconds \(slamb\) .*-1"),
    (advise(optimizer_seconds=3), r"optimizer_seconds must be \(lamb, slamb\), got 3"),
    (
        lambda: WireReport(()).bytes_over(mesh_of(2), "model"),
        "mesh must have the axis 'model'",
    ),
    (of(slamb_jax.wire_report, "no program"), "program .*'no program'"),
    (of(slamb_jax.wire_report, 3), "program .*3"),
]
