"""The seconds of collectives are those of rings that are stepped hop by hop."""

import math

import pytest

from slamb_jax import Network


def stepped_ring(network, payload_bytes, steps):
    """When a ring that visits node after node has made its steps, hop by hop.

    A piece goes in two halves. Worker i sends its next half when its last one has left,
    and the half that it forwards has arrived from worker i - 1.
    """
    n, w = network.workers, network.workers_per_node
    bits = 8 * payload_bytes / n / 2
    last = [i % w == w - 1 for i in range(n)]
    busy = [bits / (network.link if x else network.local_link) for x in last]
    late = [network.latency if x else 0.0 for x in last]
    free, here, later = [0.0] * n, [0.0] * n, [0.0] * n
    for _ in range(2 * steps):
        free = [max(f, h) + b for f, h, b in zip(free, here, busy, strict=True)]
        here, later = later, [free[i - 1] + late[i - 1] for i in range(n)]
    return max(later)


@pytest.mark.parametrize(("workers", "per_node"), [(4, 1), (16, 4), (64, 8)])
@pytest.mark.parametrize("local", [math.inf, 4e9, 5e8])
@pytest.mark.parametrize("late", [0.0, 1e-4, 1e-2])
def test_collectives_take_as_long_as_a_stepped_ring(workers, per_node, local, late):
    links = {"latency": late, "workers_per_node": per_node, "local_link": local}
    network = Network(workers, 1e9, **links)
    # The last round is not complete where workers share a node.
    room = 1e-9 if per_node == 1 else 0.15
    whole, half = (stepped_ring(network, 1e7, x * (workers - 1)) for x in (2, 1))
    assert network.seconds("all-reduce", 1e7) == pytest.approx(whole, rel=room)
    gathered = network.seconds("all-gather", 1e7 / workers)
    assert gathered == pytest.approx(half, rel=room)
    assert gathered == network.seconds("reduce-scatter", 1e7)


def test_an_all_to_all_fills_the_links_of_full_nodes_and_a_node_uses_its_own():
    nodes = [Network(64, 1e9, latency=0.1, workers_per_node=w) for w in (1, 8, 32)]
    seconds = [node.seconds("all-to-all", 8e6) for node in nodes]
    pieces = [1 * 63, 8 * 56, 32 * 32]  # of 1 Mbit, that leave a node
    at_once = 0.6 * 8 * 2**16 / 1e9  # 64 KiB, which do not queue
    assert seconds == pytest.approx([0.1 + 1.6e-3 * p - at_once for p in pieces])
    few = Network(4, 1e9, latency=0.1).seconds("all-to-all", 8e4)
    assert few == pytest.approx(0.1 + 8 * 6e4 / 1e9)

    # A single node uses its local link only.
    node = Network(8, 1e9, workers_per_node=8, local_link=1e11)
    flat = Network(8, 1e11)
    for kind in ("all-reduce", "all-gather", "collective-permute"):
        assert node.seconds(kind, 1e9) == flat.seconds(kind, 1e9)
    # Nothing crosses inside a node.
    share = node.seconds("all-to-all", 1e9) / flat.seconds("all-to-all", 1e9)
    assert share == pytest.approx(1 / 1.6, rel=1e-3)
