"""Hosts on one machine: network namespaces on a switch, every link shaped.

Each host is a namespace with one interface, ``eth0``, whose other end is a port of a
switch, a process that delays. The switch has a namespace of its own: the machine's own
network, its firewall included, neither sees the traffic nor is changed, and everything
is removed with the namespaces.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HOSTS_FILES = Path("/etc/netns")  # ``ip netns exec`` mounts its files over /etc
# TCP hands an interface larger packets than a wire carries, as to a card that segments
# them. Two fit into the bucket: else the bucket segments them itself, and that takes
# more processor time than a gigabit link leaves.
PACKET = 32 * 1024  # bytes
BURST = 2 * PACKET
# A full bucket is sent at once. For what comes in it holds half a millisecond, or a
# small exchange would be over before a slow link is felt.
BURST_SECONDS = 0.5e-3
QUEUE = 16 * 2**20  # bytes that wait at a link: all that can be on its way, none drops

LONG = {  # of net.ipv4; least, first and most bytes that a connection has on its way
    "tcp_slow_start_after_idle": "0",
    "tcp_wmem": "4096 16384 33554432",
    "tcp_rmem": "4096 131072 67108864",
}


def missing() -> str | None:
    """The part that the machine lacks for a network of namespaces; None if none."""
    if not hasattr(os, "geteuid") or not Path("/proc/self/ns/net").exists():
        return "Linux with network namespaces"
    if os.geteuid() != 0:
        return "root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"iproute2 (no {' and no '.join(absent)} here)" if absent else None


class Network:
    """Hosts joined by a switch, their links not shaped yet; made by :func:`network`."""

    def __init__(self, name: str, hosts: int) -> None:
        self.switch = f"{name}-switch"
        self.hosts = [f"{name}-{i}" for i in range(hosts)]
        self.delays: subprocess.Popen[str] | None = None

    def address(self, host: int) -> str:
        """The host's address, the same in every run: nothing else is on the switch."""
        return f"10.0.0.{host + 1}"

    def command(self, host: int) -> list[str]:
        """The words before a command that run it on that host."""
        return ["ip", "netns", "exec", self.hosts[host]]

    def shape(self, mbit: float, round_trip: float) -> None:
        """Gives every link that many Mbit/s in each direction, and a delay in seconds.

        Both ends of each link send through a token bucket: the host's end
        for its traffic out, the switch's end for its traffic in.
        """
        burst = max(2 * 1514, round(min(BURST, BURST_SECONDS * mbit * 1e6 / 8)))
        for i, host in enumerate(self.hosts):
            ends = (host, "eth0", BURST), (self.switch, f"port{i}", burst)
            for namespace, device, at_once in ends:
                where = ("-n", namespace, "qdisc", "replace", "dev", device, "root")
                rate = ("rate", f"{mbit}mbit", "burst", str(at_once))
                _run("tc", *where, "tbf", *rate, "limit", str(QUEUE))
        assert self.delays is not None
        assert self.delays.stdin
        print(round_trip / 2, file=self.delays.stdin, flush=True)


@contextlib.contextmanager
def network(hosts: int) -> Iterator[Network]:
    """Makes the hosts; removes all of them again, whatever ends the block.

    Two runs at a time do not meet: the names carry the process id.

    Raises:
      RuntimeError: if ``ip`` refuses, with its message.
    """
    net = Network(f"slamb-{os.getpid()}", hosts)
    try:
        _make(net)
        _delay(net)
        yield net
    finally:
        with _signals_ignored():
            if net.delays is not None:
                net.delays.kill()
                net.delays.communicate()
            for name in [*net.hosts, net.switch]:
                _run("ip", "netns", "delete", name, check=False)
                shutil.rmtree(HOSTS_FILES / name, ignore_errors=True)
            with contextlib.suppress(OSError):
                HOSTS_FILES.rmdir()  # unless it holds the files of others


def _make(net: Network) -> None:
    _run("ip", "netns", "add", net.switch)
    for i, host in enumerate(net.hosts):
        _run("ip", "netns", "add", host)
        peer = f"peer name port{i} netns {net.switch}"
        _ip(host, f"link add eth0 type veth {peer}")
        _ip(net.switch, f"link set port{i} up")
        _ip(host, f"address add {net.address(i)}/24 dev eth0")
        _ip(host, "link set lo up")
        _ip(host, "link set eth0 up")
        _ip(host, f"link set eth0 gso_max_size {PACKET}")
        # Every kernel lets a namespace have this one, whatever its own default.
        reno = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
        _run(*net.command(i), "sh", "-c", reno)
        # gloo listens on the address that the machine's name has.
        (HOSTS_FILES / host).mkdir(parents=True)
        names = f"127.0.0.1 localhost\n{net.address(i)} {socket.gethostname()}\n"
        (HOSTS_FILES / host / "hosts").write_text(names)


def _delay(net: Network) -> None:
    """Starts the process that forwards between the ports."""
    for i, host in enumerate(net.hosts):
        _ip(host, f"link set eth0 address 02:00:00:00:00:{i:02x}")
        # As hosts are set up for long links: a sender fills them, also after a pause.
        for name, value in LONG.items():
            setting = f"echo {value} > /proc/sys/net/ipv4/{name}"
            _run(*net.command(i), "sh", "-c", setting)
    command = ["ip", "netns", "exec", net.switch, sys.executable, "-m"]
    net.delays = subprocess.Popen(
        [*command, "benchmarks.network.delay", str(len(net.hosts))],
        cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def _ip(namespace: str, command: str) -> None:
    _run("ip", "-n", namespace, *command.split())


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=False
    )
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """Lets no signal end the clearing up half-way."""
    numbers = signal.SIGINT, signal.SIGTERM
    kept = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
