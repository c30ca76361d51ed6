"""Runs command lines of other programs on nodes with their own networks and host names.

Run as a program, this module builds the nodes' namespaces, prints ``ready``, and keeps them until its
standard input ends.
"""

import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.nodes.links import Nodes
from tests.support.python_process import ROOT

_READY = b"ready\n"


@dataclass(frozen=True)
class NodeCommands:
    """Makes command lines that run on existing nodes, which the process ``keeper`` holds."""

    keeper: int

    @staticmethod
    def name(node):
        """Return a node's host name, which all nodes can resolve."""
        return f"node{node}"

    def on(self, node):
        """Return the words to put before a command.

        They start the command itself, not a parent process of it.
        """
        return [
            *("nsenter", "--target", str(self.keeper), "--net", "--mount", "--wd=.", "--"),
            *("ip", "netns", "exec", self.name(node), "unshare", "--uts", "--"),
            *("sh", "-c", 'hostname "$0" && exec "$@"', self.name(node)),
        ]


@contextmanager
def built_nodes(nodes):
    """Build nodes that exist inside this context. Only root can build them.

    The caller must end all processes on the nodes, because they are not in a process namespace.
    """
    words = [sys.executable, "-m", __name__, str(nodes.num_nodes), str(nodes.rate_bits_per_s)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    keeper = subprocess.Popen(["unshare", "--net", "--mount", "--", *words], cwd=ROOT, **pipes)
    try:
        if keeper.stdout.readline() != _READY:
            raise RuntimeError(f"nodes: {keeper.stderr.read().decode().strip() or 'refused'}")
        yield NodeCommands(keeper.pid)
    finally:
        keeper.communicate()


def _keep(nodes):
    nodes.build()
    hosts = Path("/run/hosts")  # /run is a file system of this mount namespace
    lines = [f"{nodes.address(node)} {NodeCommands.name(node)}" for node in range(nodes.num_nodes)]
    hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]), encoding="ascii")
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    os.write(1, _READY)
    while os.read(0, 1):
        pass


if __name__ == "__main__":
    _keep(Nodes(int(sys.argv[1]), int(sys.argv[2])))
