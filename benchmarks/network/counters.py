"""What crossed a network interface, by the kernel's own counters."""

import dataclasses
import json
import subprocess
from pathlib import Path

HEADER = 14 + 20 + 32  # bytes of Ethernet, of IPv4, of TCP with its timestamps


@dataclasses.dataclass(frozen=True)
class Counters:
    """Sent so far: by the interface, and by the queue that paces it.

    TCP hands packets of up to 64 KiB to the interface, as to a network card that cuts
    them. The interface counts each once, with one header. The queue counts, and paces,
    the packets of 1500 bytes and the headers that they would be cut into.
    """

    interface_bytes: int
    interface_packets: int
    queue_bytes: int
    queue_packets: int
    dropped: int

    @classmethod
    def read(cls, interface: str) -> "Counters":
        """The counters of an interface of this process's network namespace."""
        files = Path("/sys/class/net") / interface / "statistics"
        sent = (int((files / f"tx_{what}").read_text()) for what in ("bytes", "packets"))
        listed = subprocess.run(
            ["tc", "-s", "-j", "qdisc", "show", "dev", interface],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
        queue = json.loads(listed.stdout)[0]
        return cls(*sent, queue["bytes"], queue["packets"], queue["drops"])

    def __sub__(self, before: "Counters") -> "Counters":
        pairs = zip(
            dataclasses.astuple(self), dataclasses.astuple(before), strict=True
        )
        return Counters(*(b - a for b, a in pairs))
