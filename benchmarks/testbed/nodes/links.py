"""Builds nodes as network namespaces that are connected by links of a given rate.

Every node has one interface, ``eth0``. Its other end is in a bridge of the namespace that builds the nodes.
HTB limits the rate of both ends, with one class for each other node, because one queue for all peers shares a
link unfairly when many nodes send to one. No latency is added.
"""

import os
import re
import subprocess
from dataclasses import dataclass

INTERFACE = "eth0"
PAYLOAD_SHARE = 1448 / 1514
"""Payload of a full TCP segment divided by its size on the wire."""
_QUEUE_BYTES = 32_000_000
_BURST_BYTES = 3028
_SEGMENT_BYTES = 32768  # largest segment in a queue; smaller ones keep cores busy, and 64 KB cause bursts
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def parse_rate(text: str) -> int:
    """Return the bits per second of a rate such as ``400mbit``.

    Raises:
        ValueError: The text is not a rate.
    """
    match = re.fullmatch(r"(\d+)(kbit|mbit|gbit)", text.lower())
    if match is None or not int(match[1]):
        raise ValueError(f"rate: got {text!r}, wanted a number with its unit, such as 400mbit or 1gbit")
    return int(match[1]) * _UNITS[match[2]]


def payload_bytes_per_s(rate_bits_per_s: int) -> float:
    """Return the payload bytes per second that a link of a rate carries in one direction."""
    return rate_bits_per_s / 8 * PAYLOAD_SHARE


@dataclass(frozen=True)
class Nodes:
    """Nodes as network namespaces ``node0``, ``node1``, ….

    Attributes:
        num_nodes: Number of nodes.
        rate_bits_per_s: Of each node's link, in each direction.
    """

    num_nodes: int
    rate_bits_per_s: int

    @staticmethod
    def address(node: int) -> str:
        """Return the IPv4 address of a node."""
        return f"10.77.{(node + 1) // 250}.{(node + 1) % 250}"

    def build(self) -> None:
        """Build the nodes.

        The process must be in its own network and mount namespaces, with root rights in both.

        Raises:
            RuntimeError: The system refused a command.
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
        """Limit the rate of an interface, with one class for each peer.

        Packets that leave a node are classified by destination. Packets that arrive are classified by source.
        """
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
    """Move this process into a node's network. The process must have only one thread."""
    descriptor = os.open(f"/run/netns/node{node}", os.O_RDONLY)
    try:
        os.setns(descriptor, os.CLONE_NEWNET)
    finally:
        os.close(descriptor)


def sent_and_received_bytes(interface: str) -> tuple[int, int]:
    """Return the sent and received bytes of an interface in this process's network, headers included."""
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
