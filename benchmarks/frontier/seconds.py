"""From what is sent to seconds on a link: the one place that knows how."""

from benchmarks.rivals import Sends

LINKS = {"100 Mbit": 1e8, "1 Gbit": 1e9, "10 Gbit": 1e10, "100 Gbit": 1e11}
LATENCY = 20e-6  # seconds that a message takes beyond its bytes


def exchange_seconds(sends: Sends, workers: int, link: float) -> float:
    """Seconds that the collectives take, one after another, nothing overlapping.

    A ring of n workers, each with one link of that many bits per second to the others:
    an all-reduce of B bytes takes 2 (n-1) (8B / (n link) + latency), an all-gather
    (n-1) (8B / link + latency); an all-to-all sends its pieces at once.
    """
    n, total = workers, 0.0
    for kind, payload in sends:
        bits = 8 * payload
        if kind == "all-reduce":
            total += 2 * (n - 1) * (bits / n / link + LATENCY)
        elif kind == "all-gather":
            total += (n - 1) * (bits / link + LATENCY)
        else:
            total += (n - 1) * bits / n / link + LATENCY
    return total
