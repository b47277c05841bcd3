"""Bytes that a host sent, by the kernel's own counters."""

import json
import subprocess
from pathlib import Path
from typing import NamedTuple

HEADERS = 14 + 20 + 32  # bytes of Ethernet, of IPv4, of TCP with its timestamps
SEGMENT = 1500 - 20 - 32  # bytes of data in a full packet of a network of MTU 1500
SHARE = SEGMENT / (SEGMENT + HEADERS)  # of a link's bits that can carry data


class Counters(NamedTuple):
    """Bytes and packets sent so far.

    TCP hands packets of tens of KiB to an interface, as to a card that segments them.
    The interface counts each once, with one header. The queue that shapes the link
    counts, and paces, its segments: packets of 1514 bytes, each with a header.
    """

    interface_bytes: int
    interface_packets: int
    queue_bytes: int  # 0 where there is no queue, as on a loopback interface
    queue_packets: int
    dropped: int

    @property
    def data_bytes(self) -> int:
        """The data that TCP was given to send, without headers."""
        return self.interface_bytes - HEADERS * self.interface_packets

    @property
    def header_share(self) -> float:
        """Headers and acknowledgements, as a share of all that was sent."""
        sent = self.queue_bytes or self.interface_bytes
        return (sent - self.data_bytes) / max(1, sent)


def read(interface: str) -> Counters:
    """The counters of an interface of this process's network namespace."""
    files = Path("/sys/class/net") / interface / "statistics"
    size, packets = (int((files / f"tx_{x}").read_text()) for x in ("bytes", "packets"))
    if interface == "lo":
        return Counters(size, packets, 0, 0, 0)
    listed = subprocess.run(
        ["tc", "-s", "-j", "qdisc", "show", "dev", interface],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    queue = json.loads(listed.stdout)[0]
    return Counters(size, packets, queue["bytes"], queue["packets"], queue["drops"])
