"""A server process that imports the libraries once, computes nothing, and forks the ranks of each job."""

import contextlib
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_DUMP_S = 0.1  # time for ranks that timed out to print where they hang


@dataclass(frozen=True)
class RankJob:
    """One function call on every rank of a new process group.

    Attributes:
        call: Pickled function and tuple of its arguments after ``rank`` and ``world_size``.
        world_size: Number of ranks.
        timeout_s: Time limit of the whole job and of each collective in it, in seconds.
        grace_s: Seconds that the other ranks have to end by themselves after a rank has failed.
        env: Environment variables of every rank.
        preparation: Import path, working directory and main module, as ``multiprocessing`` describes them.
        folder: Existing folder for the ranks' files: ``<rank>.log``, ``<rank>.result`` with the pickled
            return value, ``<rank>.failure`` with the pickled time and traceback of an exception.
    """

    call: bytes
    world_size: int
    timeout_s: float
    grace_s: float
    env: dict[str, str]
    preparation: dict[str, Any]
    folder: Path


@dataclass(frozen=True)
class JobReport:
    """Exit codes of all ranks (signals are negative), ranks that the server ended, whether time was up."""

    exit_codes: tuple[int, ...]
    unfinished: tuple[int, ...]
    timed_out: bool


def serve(descriptor: int, preload: tuple[str, ...]) -> None:
    """Run the preload entries, then run jobs from the caller's connection until the caller closes it."""
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


def _run(job: RankJob, caller: Connection) -> JobReport:
    end_s = time.monotonic() + job.timeout_s
    with socket.create_server(("127.0.0.1", 0), backlog=max(128, job.world_size)) as listener:
        pids = [_fork(job, rank, listener, caller) for rank in range(job.world_size)]
    running = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
    exit_codes = [0] * job.world_size
    failed = timed_out = False
    try:
        while running:
            ready = wait([caller, *running], max(0.0, end_s - time.monotonic()))
            if caller in ready:
                raise EOFError("the caller closed the connection")
            for descriptor in running.keys() & set(ready):
                rank = running.pop(descriptor)
                exit_codes[rank] = _reap(pids[rank], descriptor)
            if not failed and any(exit_codes):
                failed, end_s = True, time.monotonic() + job.grace_s
            elif not ready and (failed or timed_out):
                break
            elif not ready:
                timed_out, end_s = True, time.monotonic() + _DUMP_S
                for rank in running.values():
                    os.kill(pids[rank], signal.SIGUSR1)
    finally:
        for descriptor, rank in running.items():
            os.kill(pids[rank], signal.SIGKILL)
            exit_codes[rank] = _reap(pids[rank], descriptor)
    return JobReport(tuple(exit_codes), tuple(running.values()), timed_out)


def _reap(pid: int, descriptor: int) -> int:
    os.close(descriptor)
    # End processes that the rank started and left, such as checkpoint writers.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork(job: RankJob, rank: int, listener: socket.socket, caller: Connection) -> int:
    if pid := os.fork():
        return pid
    exit_code = 1
    try:
        os.setpgid(0, 0)
        caller.close()
        _redirect_output(job.folder / f"{rank}.log")
        try:
            _call(job, rank, listener)
            exit_code = 0
        except BaseException:
            failure = pickle.dumps((time.monotonic(), traceback.format_exc()))
            (job.folder / f"{rank}.failure").write_bytes(failure)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(exit_code)


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(descriptor, number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False, errors="replace"))  # noqa: SIM115
    # The server sends this signal to ranks that exceed the time limit. The traceback shows where they hang.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    faulthandler.enable(file=sys.stderr)


def _call(job: RankJob, rank: int, listener: socket.socket) -> None:
    import torch.distributed as dist

    spawn.prepare(job.preparation)
    port = listener.getsockname()[1]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ.update({"LOCAL_WORLD_SIZE": str(job.world_size), "MASTER_ADDR": "127.0.0.1", **job.env})
    limit: dict[str, Any] = {"timeout": datetime.timedelta(seconds=job.timeout_s)}
    served = dict(limit)
    if rank == 0:  # It serves the store on the inherited socket, so that no port has to be guessed.
        served |= {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    else:
        listener.close()
    store = dist.TCPStore("127.0.0.1", port, job.world_size, **served)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size, **limit)
    function, arguments = pickle.loads(job.call)
    result = pickle.dumps(function(rank, job.world_size, *arguments))
    (job.folder / f"{rank}.result").write_bytes(result)
    if dist.is_initialized():
        dist.barrier()  # Rank 0 serves the store, so no rank may leave before all ranks have finished.
        dist.destroy_process_group()
