"""Bytes that a host sent, by the kernel's own counters."""

from pathlib import Path
from typing import NamedTuple

HEADERS = 14 + 20 + 32  # bytes of Ethernet, of IPv4, of TCP with its timestamps
SEGMENT = 1500 - 20 - 32  # bytes of data in a full packet of a network of MTU 1500
SHARE = SEGMENT / (SEGMENT + HEADERS)  # of a link's bits that can carry data


class Counters(NamedTuple):
    """Bytes and packets sent so far.

    TCP hands packets of tens of KiB to an interface, as to a card that segments them.
    The interface counts each once, with one header. What is lost is sent, and counted,
    once more.
    """

    bytes: int
    packets: int

    @property
    def data_bytes(self) -> int:
        """The data that TCP was given to send, without headers."""
        return self.bytes - HEADERS * self.packets


def read() -> Counters:
    """The counters of this process's host."""
    files = Path("/sys/class/net/eth0/statistics")
    return Counters(*(int((files / f"tx_{x}").read_text()) for x in Counters._fields))
