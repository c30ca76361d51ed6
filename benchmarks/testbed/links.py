"""Nodes as network namespaces, joined by links of a given rate.

Every node has one interface, ``eth0``, whose other end lies in a bridge of the namespace that builds the
nodes. Both ends are shaped by HTB with one class for each other node, because one queue for all peers
shares a link unfairly when many send to one. No latency is added.
"""

import os
import re
import subprocess
from dataclasses import dataclass

INTERFACE = "eth0"
PAYLOAD_SHARE = 1448 / 1514
"""Payload of a full TCP segment over what it occupies on the wire."""
_QUEUE_BYTES = 32_000_000
_BURST_BYTES = 3028
_SEGMENT_BYTES = 32768  # largest piece that is queued at once; less keeps cores busy, 64 KB come in bursts
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def parse_rate(text: str) -> int:
    """Bits a second of a rate such as ``400mbit``.

    Raises:
        ValueError: It is not one.
    """
    match = re.fullmatch(r"(\d+)(kbit|mbit|gbit)", text.lower())
    if match is None or not int(match[1]):
        raise ValueError(f"rate: got {text!r}, wanted a number with its unit, such as 400mbit or 1gbit")
    return int(match[1]) * _UNITS[match[2]]


def payload_bytes_per_s(rate_bits_per_s: int) -> float:
    """What a link of a rate carries of its users' bytes in one direction."""
    return rate_bits_per_s / 8 * PAYLOAD_SHARE


@dataclass(frozen=True)
class Nodes:
    """Namespaces ``node0``, ``node1``, ….

    Attributes:
        num_nodes: How many.
        rate_bits_per_s: Of each node's link, in each direction.
    """

    num_nodes: int
    rate_bits_per_s: int

    @staticmethod
    def address(node: int) -> str:
        """IPv4 address of a node."""
        return f"10.77.{(node + 1) // 250}.{(node + 1) % 250}"

    def build(self) -> None:
        """Make them, in private network and mount namespaces with the rights of root in both.

        Raises:
            RuntimeError: A command was refused.
        """
        _run("mount -t tmpfs tmpfs /run")
        _run("ip link set lo up")
        _run("ip link add switch type bridge stp_state 0 forward_delay 0")
        _run("ip link set switch up")
        for node in range(self.num_nodes):
            name, port = f"node{node}", f"port{node}"
            _run(f"ip netns add {name}")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip link add {port} type veth peer name {INTERFACE} netns {name}")
            _run(f"ip link set {port} master switch")
            _run(f"ip link set {port} up")
            _run(f"ip -n {name} addr add {self.address(node)}/16 dev {INTERFACE}")
            _run(f"ip -n {name} link set {INTERFACE} up")
            # By route: the sysctl of the congestion control may be refused in a namespace.
            _run(
                f"ip -n {name} route change 10.77.0.0/16 dev {INTERFACE} proto kernel scope link "
                f"src {self.address(node)} congctl cubic"
            )
            for setting in ("tcp_slow_start_after_idle=0", "tcp_no_metrics_save=1"):
                _run(f"ip netns exec {name} sysctl -qw net.ipv4.{setting}")
        for node in range(self.num_nodes):
            self._shape(f"ip netns exec node{node} ", INTERFACE, node, "dst")
            self._shape("", f"port{node}", node, "src")

    def _shape(self, prefix: str, interface: str, node: int, side: str) -> None:
        """One class for each peer: by destination where packets leave a node, by source where they arrive."""
        rate = self.rate_bits_per_s
        _run(f"{prefix}ip link set dev {interface} gso_max_size {_SEGMENT_BYTES} gso_max_segs 64")
        _run(f"{prefix}tc qdisc add dev {interface} root handle 1: htb default f000")
        limits = f"ceil {rate}bit burst {_BURST_BYTES} cburst {_BURST_BYTES}"
        _run(f"{prefix}tc class add dev {interface} parent 1: classid 1:1 htb rate {rate}bit {limits}")
        quantum = f"quantum {_SEGMENT_BYTES}"
        share = rate // max(1, self.num_nodes - 1)
        for peer in range(self.num_nodes):
            if peer == node:
                continue
            number = f"{peer + 16:x}"
            _run(
                f"{prefix}tc class add dev {interface} parent 1:1 classid 1:{number} "
                f"htb rate {share}bit {limits} {quantum}"
            )
            _run(f"{prefix}tc qdisc add dev {interface} parent 1:{number} bfifo limit {_QUEUE_BYTES}")
            _run(
                f"{prefix}tc filter add dev {interface} parent 1: protocol ip prio 1 "
                f"u32 match ip {side} {self.address(peer)}/32 flowid 1:{number}"
            )
        _run(
            f"{prefix}tc class add dev {interface} parent 1:1 classid 1:f000 "
            f"htb rate 1mbit {limits} {quantum}"
        )


def enter_node(node: int) -> None:
    """Move this process, which must have one thread, into a node's network."""
    descriptor = os.open(f"/run/netns/node{node}", os.O_RDONLY)
    try:
        os.setns(descriptor, os.CLONE_NEWNET)
    finally:
        os.close(descriptor)


def sent_and_received_bytes(interface: str) -> tuple[int, int]:
    """An interface's counters in this process's network, with all headers."""
    with open("/proc/self/net/dev", encoding="ascii") as file:
        for line in file:
            name, _, counters = line.partition(":")
            if name.strip() == interface:
                fields = counters.split()
                return int(fields[8]), int(fields[0])
    raise ValueError(f"no interface {interface} in this network; wanted one of a node")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip() or f'exit code {done.returncode}'}")
