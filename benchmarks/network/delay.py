"""A switch between hosts that holds every packet for a time, as a long link does.

Not every kernel has ``tc netem``. Started by ``benchmarks.network.namespaces`` with the
number of ports; reads the seconds of delay from its standard input, again and again.
"""

import collections
import contextlib
import os
import select
import socket
import sys
import time

# Of linux/if_packet.h. With its header, a packet passes as large as TCP hands it over.
SOL_PACKET, VNET_HEADER, IGNORE_OUTGOING, ALL = 263, 15, 23, 3
VNET_BYTES = 10
SEND_BUFFER, RECEIVE_BUFFER = 32, 33  # beyond the limits of those who are not root
QUEUE = 64 * 2**20
PACKET = 2**17  # bytes, more than any


def port(name: str) -> socket.socket:
    """All that comes in at an interface of this namespace."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    for option in (VNET_HEADER, IGNORE_OUTGOING):
        found.setsockopt(SOL_PACKET, option, 1)
    for option in (SEND_BUFFER, RECEIVE_BUFFER):
        found.setsockopt(socket.SOL_SOCKET, option, QUEUE)
    found.bind((name, ALL))
    found.setblocking(False)
    return found


def forward(packet: bytes, source: int, ports: list[socket.socket]) -> None:
    """To the host whose number the address ends with, or to all others."""
    address = packet[VNET_BYTES : VNET_BYTES + 6]
    others = [i for i in range(len(ports)) if i != source]
    for i in others if address[0] & 1 else [address[5]]:
        ports[i].send(packet)


def main(count: int) -> None:
    os.nice(-10)  # it stands for links, which wait for no processor
    ports = [port(f"port{i}") for i in range(count)]
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    delay = 0.0
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([sys.stdin, *ports], (), (), left)
        if sys.stdin in ready:
            if not (line := sys.stdin.readline()):
                return
            delay = float(line)
        for i, one in enumerate(ports):
            with contextlib.suppress(BlockingIOError):
                while one in ready:
                    waiting.append((time.monotonic() + delay, i, one.recv(PACKET)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, source, packet = waiting.popleft()
            forward(packet, source, ports)


if __name__ == "__main__":
    main(int(sys.argv[1]))
