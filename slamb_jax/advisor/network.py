"""Seconds that collectives take on links of a given speed."""

import dataclasses
import math

from slamb_jax._core.checks import check_choice, check_integer, check_range
from slamb_jax.wire.hlo import RING_SHARES

# Measured by benchmarks/network over TCP: in an all-to-all, acknowledgements wait in a
# queue after the data of the other direction. What goes out at once never queues.
_CROSSING, _AT_ONCE = 1.6, 8.0 * 2**16  # bits


@dataclasses.dataclass(frozen=True)
class Network:
    r"""Workers in nodes joined by links; predicts the seconds of a collective.

    Of n workers, w are on each node, and a ring that visits node after node crosses the
    full-duplex link of each once. With :math:`b = 8B/(n\,link)`, the seconds of one
    piece on a link, an all-reduce of B bytes takes

    .. math:: (2n-3)\,\max\left(b,\ \frac{b/2 + latency}{w}\right) + b + latency

    since a piece goes in two halves, of which one is sent while the other is on its
    way, as Gloo does. An all-gather or a reduce-scatter has n - 2 such steps. In an
    all-to-all each worker sends a piece to each other worker, all at once, so the link
    carries :math:`w\,\frac{n-w}{n}\,B`, and the latency counts once: with many workers
    per node it costs far more than a ring. Between nodes its flows cross, and what is
    more than 64 KiB takes 1.6 times as long as its bytes alone. A permute leaves the
    node with the bytes of all its workers. There is no congestion, no time for sums,
    and no overlap; libraries that use trees for many workers have a lower latency.

    Args:
      workers: n, at least 2.
      link: bits per second from a node to the others, in each direction; positive.
      latency: seconds that one message takes beyond its bytes; not negative. Gloo,
        between CPUs, asks before it sends: there it is the whole round trip.
      workers_per_node: w, at least 1; divides n.
      local_link: bits per second between two workers of a node; positive. With a
        single node it is the only link.

    Raises:
      ValueError: for a value out of range, for workers that do not fill their nodes,
        and for a single node without a ``local_link``.

    Examples:
      >>> import slamb_jax
      >>> network = slamb_jax.Network(workers=4, link=200e6, latency=0.02)
      >>> round(network.seconds("all-reduce", 16e6), 3)
      0.98
    """

    workers: int
    link: float
    _: dataclasses.KW_ONLY
    latency: float = 20e-6
    workers_per_node: int = 1
    local_link: float = math.inf

    def __post_init__(self) -> None:
        check_integer("workers", self.workers, 2)
        check_integer("workers_per_node", self.workers_per_node, 1)
        check_range("link", self.link, 0.0, open_low=True, open_high=True)
        check_range("local_link", self.local_link, 0.0, open_low=True)
        check_range("latency", self.latency, 0.0, open_high=True)
        if self.workers % self.workers_per_node:
            raise ValueError(
                f"workers must be whole nodes of workers_per_node, got {self}"
            )
        if self.workers == self.workers_per_node and math.isinf(self.local_link):
            raise ValueError(f"local_link must be given for a single node, got {self}")

    def seconds(self, kind: str, payload_bytes: float) -> float:
        """Seconds that one collective takes.

        Args:
          kind: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``,
            ``"all-to-all"`` or ``"collective-permute"``.
          payload_bytes: bytes that each worker puts in; not negative.

        Raises:
          ValueError: for another kind, and for bytes out of range.
        """
        check_choice("kind", kind, tuple(RING_SHARES))
        check_range("payload_bytes", payload_bytes, 0.0, open_high=True)
        n, w, link, at_once = self.workers, self.workers_per_node, self.link, _AT_ONCE
        if w == n:  # a ring of workers, as if each were a node
            w, link, at_once = 1, self.local_link, math.inf
        local = self.local_link if w > 1 else math.inf
        bits = 8 * RING_SHARES[kind](n) * payload_bytes
        if kind in ("all-to-all", "collective-permute"):
            leaving = bits * w
            if kind == "all-to-all":
                leaving *= (n - w) / (n - 1)
                leaving += (_CROSSING - 1) * max(0.0, leaving - at_once)
            return max(leaving / link, bits / local) + self.latency
        hops = 2 * (n - 1) if kind == "all-reduce" else n - 1
        slow, fast = bits / hops / link, bits / hops / local
        around = (slow / 2 + self.latency + (w - 1) * fast / 2) / w
        return (hops - 1) * max(slow, fast, around) + slow + self.latency
