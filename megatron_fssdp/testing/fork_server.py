"""A server process that imports the libraries once, computes nothing, and forks the ranks of each job."""

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from megatron_fssdp.testing.rank_job import RankJob, run_rank

_DUMP_S = 0.1  # time for ranks that timed out to print where they hang
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


@dataclass(frozen=True)
class JobReport:
    """How the ranks of a job ended.

    Attributes:
        exit_codes: Exit code of each rank. A negative number is the signal that ended the rank.
        unfinished: Ranks that the server ended, because another rank failed or the time limit was reached.
        timed_out: Whether the time limit was reached.
    """

    exit_codes: tuple[int, ...]
    unfinished: tuple[int, ...]
    timed_out: bool


def serve(descriptor: int, preload: tuple[str, ...]) -> None:
    """Run the preload entries, then run jobs from the connection until the caller closes it.

    The first message to the caller is an empty string, or the traceback of a failed preload entry.

    Args:
        descriptor: File descriptor of the connection to the caller.
        preload: Entries to run in order. ``"module"`` is imported. ``"module:function"`` is imported, and
            then the function is called without arguments.
    """
    connection = Connection(descriptor)
    try:
        for entry in preload:
            module, _, function = entry.partition(":")
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
    except BaseException:
        connection.send(traceback.format_exc())
        return
    gc.collect()
    gc.freeze()  # the garbage collector then does not touch the shared pages, which would copy them
    connection.send("")
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            connection.send(_run(connection.recv(), connection))


def _run(job: RankJob, connection: Connection) -> JobReport:
    deadline_s = time.monotonic() + job.timeout_s
    with socket.create_server(("127.0.0.1", 0), backlog=max(128, job.world_size)) as listener:
        pids = [_fork_rank(job, rank, listener, connection) for rank in range(job.world_size)]
    children = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
    exit_codes: dict[int, int] = {}
    unfinished: tuple[int, ...] = ()
    timed_out = False
    try:
        while children:
            ready = wait([connection, *children], max(0.0, deadline_s - time.monotonic()))
            if connection in ready:
                raise EOFError("the caller closed the connection")
            for descriptor in [d for d in children if d in ready]:
                rank = children[descriptor]
                exit_codes[rank] = _reap(pids, children, descriptor)
            timed_out = not ready and bool(children)
            if timed_out or any(exit_codes.values()):
                unfinished = _end(job, pids, children, exit_codes, timed_out)
    finally:
        for descriptor, rank in list(children.items()):
            os.kill(pids[rank], signal.SIGKILL)
            _reap(pids, children, descriptor)
    return JobReport(tuple(exit_codes[rank] for rank in range(job.world_size)), unfinished, timed_out)


def _end(
    job: RankJob, pids: list[int], children: dict[int, int], exit_codes: dict[int, int], timed_out: bool
) -> tuple[int, ...]:
    """End the ranks that still run. Return those that did not end by themselves within the grace time."""
    if timed_out:
        for rank in children.values():
            os.kill(pids[rank], signal.SIGUSR1)
    grace_end_s = time.monotonic() + (_DUMP_S if timed_out else job.grace_s)
    running = dict(children)
    while running and (left_s := grace_end_s - time.monotonic()) > 0:
        for descriptor in wait(list(running), left_s):
            assert isinstance(descriptor, int)
            running.pop(descriptor)
    unfinished = tuple(children.values()) if timed_out else tuple(running.values())
    for rank in running.values():
        os.kill(pids[rank], signal.SIGKILL)
    for descriptor, rank in list(children.items()):
        exit_codes[rank] = _reap(pids, children, descriptor)
    return unfinished


def _reap(pids: list[int], children: dict[int, int], descriptor: int) -> int:
    rank = children.pop(descriptor)
    os.close(descriptor)
    # End processes that the rank started and left, such as checkpoint writers, before its number can be
    # reused.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pids[rank], signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])


def _fork_rank(job: RankJob, rank: int, listener: socket.socket, connection: Connection) -> int:
    pid = os.fork()
    if pid:
        return pid
    exit_code = 1
    try:
        _die_with_parent()
        os.setpgid(0, 0)
        connection.close()
        exit_code = run_rank(job, rank, listener)
    finally:
        os._exit(exit_code)


def _die_with_parent() -> None:
    """Ask Linux to end this process when the server ends for any reason."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
