"""Wrong questions to the advisor and to the wire report."""

import slamb_jax
from tests.workers import mesh_of
from tests.wrong_uses.common import INF, NAN, of

NETWORK = slamb_jax.Network(workers=8, link=1e9)

ADVICE = [
    (of(slamb_jax.Network, workers=1, link=1e9), "workers .*1"),
    (of(slamb_jax.Network, workers=8, link=0), "link .*0"),
    (of(slamb_jax.Network, workers=8, link=INF), "link .*inf"),
    (of(slamb_jax.Network, workers=8, link=1e9, latency=-1), "latency .*-1"),
    (of(slamb_jax.Network, 8, 1e9, workers_per_node=3), "workers_per_node.*8 and 3"),
    (of(slamb_jax.Network, 8, 1e9, workers_per_node=8), "local_link .*inf"),
    (of(NETWORK.seconds, "broadcast", 8), "kind .*'broadcast'"),
    (of(NETWORK.seconds, "all-reduce", -8), "payload_bytes .*-8"),
    (of(slamb_jax.advise, 1e6, "network", step_seconds=1.0), "network .*'network'"),
    (of(slamb_jax.advise, 0, NETWORK, step_seconds=1.0), "params .*0"),
    (of(slamb_jax.advise, NAN, NETWORK, step_seconds=1.0), "params .*nan"),
    (of(slamb_jax.advise, {}, NETWORK, step_seconds=1.0), "params must have elements"),
    (of(slamb_jax.advise, 1e6, NETWORK, step_seconds=0.0), "step_seconds .*0.0"),
    (
        of(slamb_jax.advise, 1e6, NETWORK, step_seconds=1.0, optimizer_seconds=3),
        "optimizer_seconds .*3",
    ),
    (
        of(slamb_jax.advise, 1e6, NETWORK, step_seconds=1.0, payload="int8"),
        "payload .*'int8'",
    ),
    (
        of(slamb_jax.advise, 1e6, NETWORK, step_seconds=1.0, average_payload=4),
        "average_payload .*4",
    ),
    (
        of(slamb_jax.advise, 1e6, NETWORK, step_seconds=1.0, hierarchical=True),
        "hierarchical=True .*workers_per_node=1",
    ),
    (
        of(slamb_jax.advise, 1e6, NETWORK, step_seconds=1.0, hierarchical="yes"),
        "hierarchical .*'yes'",
    ),
    (
        lambda: slamb_jax.WireReport(()).bytes_over(mesh_of(2), "model"),
        "mesh must have the axis 'model'",
    ),
    (of(slamb_jax.wire_report, "no program"), "program .*'no program'"),
    (of(slamb_jax.wire_report, 3), "program .*3"),
]
