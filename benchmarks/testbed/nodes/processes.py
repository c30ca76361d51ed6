"""Starts a run in its own set of namespaces, and the ranks in them.

A run has its own network, mount and process namespaces. When the first process in them ends, the kernel
removes the namespaces and all of their processes. This first process ends when the command that started it
ends for any reason, SIGKILL included.
"""

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.testbed.nodes.links import INTERFACE, Nodes, enter_node

_INSIDE = "TESTBED_INSIDE"


def is_inside() -> bool:
    """Whether this process is the first process of a run's namespaces."""
    return os.environ.get(_INSIDE) == "1"


def _unshare() -> list[str]:
    # Without --user, only root can create the namespaces. With it, any user can if the kernel allows it.
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--net", "--mount", "--pid", "--fork", "--kill-child"]


def namespaces_refusal() -> str | None:
    """Return the reason why this machine cannot run the testbed, or None if it can."""
    missing = [tool for tool in ("unshare", "ip", "tc", "sysctl") if shutil.which(tool) is None]
    if missing:
        return f"missing commands: {', '.join(missing)} (install the packages util-linux, iproute2, procps)"
    probe = (
        "mount -t tmpfs tmpfs /run && ip netns add probe && ip link add probe type bridge "
        "&& tc qdisc add dev probe root handle 1: htb"
    )
    done = subprocess.run([*_unshare(), "--", "sh", "-c", probe], capture_output=True, text=True)
    return done.stderr.strip() or "refused" if done.returncode else None


def run_inside(arguments: Sequence[str]) -> int:
    """Run this program again as the first process of new namespaces, and return its exit code."""
    command = [*_unshare(), "--", sys.executable, "-m", "benchmarks.testbed", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, env={**os.environ, _INSIDE: "1", "OMP_NUM_THREADS": "1"}
    )
    assert process.stdin is not None
    try:
        return process.wait()
    finally:
        process.stdin.close()  # the process inside then reads end-of-file and ends
        process.wait()


def end_with_the_command() -> None:
    """End this process, and so the namespaces, as soon as the command outside has ended."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="watch for the end of the command", daemon=True).start()


def run_on_nodes(
    function: Callable[..., Any], nodes: Nodes, ranks_per_node: int, *args: Any, namespaces: bool = True
) -> list[Any]:
    """Call ``function(*args)`` on the ranks of a gloo process group, and return the result of each rank.

    Ranks are forked, so that they share the modules that this process has imported.

    Args:
        function: Function to call.
        nodes: Nodes of the ranks. They must be built if ``namespaces`` is true.
        ranks_per_node: Number of ranks on each node, in the order of nodes.
        *args: Arguments of the function.
        namespaces: Whether each rank moves into its node's namespace. If false, ranks communicate over
            loopback.

    Raises:
        RuntimeError: A rank failed. The message contains its traceback.
    """
    world_size = nodes.num_nodes * ranks_per_node
    port = 29500 if namespaces else _free_port()
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    processes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # warns about forking while another thread runs
        for rank in range(world_size):
            receiving, sending = context.Pipe(duplex=False)
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank % ranks_per_node),
                "LOCAL_WORLD_SIZE": str(ranks_per_node),
                "MASTER_ADDR": nodes.address(0) if namespaces else "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": INTERFACE if namespaces else "lo",
            }
            node = rank // ranks_per_node if namespaces else None
            process = context.Process(
                target=_rank_main, args=(function, args, environment, node, sending), daemon=True
            )
            process.start()
            sending.close()
            ends.append(receiving)
            processes.append(process)
    results: dict[int, Any] = {}
    try:
        while len(results) < world_size:
            for ready in wait([end for rank, end in enumerate(ends) if rank not in results]):
                rank = ends.index(ready)  # type: ignore[arg-type]
                try:
                    failure, result = ends[rank].recv()
                except EOFError:
                    failure, result = f"exit code {processes[rank].exitcode}, no report", None
                if failure is not None:
                    raise RuntimeError(f"rank {rank} failed: {failure}")
                results[rank] = result
    finally:
        for process in processes:
            if len(results) < world_size:
                process.kill()
            process.join()
    return [results[rank] for rank in range(world_size)]


def _rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environment: dict[str, str],
    node: int | None,
    sending: Connection,
) -> None:
    try:
        if node is not None:
            enter_node(node)
        os.environ.update(environment)
        import torch.distributed as dist

        dist.init_process_group("gloo")
        try:
            result = function(*args)
            dist.barrier()
        finally:
            dist.destroy_process_group()
        sending.send((None, result))
    except BaseException:
        sending.send((traceback.format_exc(), None))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
