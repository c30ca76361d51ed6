"""Nodes in which other programs' command lines run, as on machines with networks and names of their own.

As a program this module holds their namespaces: it makes them, says so, and ends with its standard input.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.links import Nodes

_ROOT = Path(__file__).parents[2]
_READY = b"ready\n"


@dataclass(frozen=True)
class NodeCommands:
    """How to run commands on nodes that are there.

    Attributes:
        keeper: Process that holds the nodes.
    """

    keeper: int

    @staticmethod
    def name(node: int) -> str:
        """A node's host name, which all of them know."""
        return f"node{node}"

    def on(self, node: int) -> list[str]:
        """Words to put before a command; what is started is the command itself, not a parent of it."""
        return [
            *("nsenter", "--target", str(self.keeper), "--net", "--mount", "--wd=.", "--"),
            *("ip", "netns", "exec", self.name(node), "unshare", "--uts", "--"),
            *("sh", "-c", 'hostname "$0" && exec "$@"', self.name(node)),
        ]


@contextmanager
def built_nodes(nodes: Nodes) -> Iterator[NodeCommands]:
    """Nodes that are there meanwhile; only root may make them.

    What runs on them is the caller's to end: their processes are not in a namespace.

    Args:
        nodes: Which.

    Raises:
        RuntimeError: The system refuses.
    """
    words = [sys.executable, "-m", __name__, str(nodes.num_nodes), str(nodes.rate_bits_per_s)]
    keeper = subprocess.Popen(
        ["unshare", "--net", "--mount", "--", *words],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    try:
        if keeper.stdout.readline() != _READY:
            raise RuntimeError(f"nodes: {keeper.stderr.read().decode().strip() or 'refused'}")
        yield NodeCommands(keeper.pid)
    finally:
        keeper.communicate()


def _keep(nodes: Nodes) -> None:
    nodes.build()
    hosts = Path("/run/hosts")  # a file system of its own
    lines = [f"{nodes.address(node)} {NodeCommands.name(node)}" for node in range(nodes.num_nodes)]
    hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]), encoding="ascii")
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    os.write(1, _READY)
    while os.read(0, 1):
        pass


if __name__ == "__main__":
    _keep(Nodes(int(sys.argv[1]), int(sys.argv[2])))
