"""Runs a function on the ranks of a new process group within a fraction of a second.

A server process imports every module once, computes nothing, and forks the ranks of every call.
"""

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe, get_context, spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

# torch.testing and the optimizers import torch._dynamo on their first use, which takes almost a second.
DEFAULT_PRELOAD = ("numpy", "torch", "torch.distributed", "torch._dynamo")


class RankError(RuntimeError):
    """A rank raised an exception, died or exceeded the time limit. The message has tracebacks and output.

    ``ranks`` are those that failed by themselves, or still ran at the time limit.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class _Job(NamedTuple):
    call: bytes  # the pickled function and its arguments after rank and world_size
    world_size: int
    timeout_s: float
    grace_s: float
    env: dict[str, str]
    preload: tuple[str, ...]
    preparation: dict[str, Any]  # import path, working directory and main module, as multiprocessing has them
    folder: Path  # for <rank>.log, and the pickled <rank>.result or <rank>.failure (its time and traceback)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 900,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = DEFAULT_PRELOAD,
    grace_s: float = 0.1,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on ranks with a gloo process group; return the results in order.

    ``fn`` is a function at the top of a module; its arguments and results are picklable. ``timeout_s`` limits
    the call. ``env`` cannot set what libraries read at import, such as OMP_NUM_THREADS (always 1).
    ``preload`` is what the server imports ("module") or has called ("module:function") before the fork, as it
    imports the module of ``fn``; this process keeps a server for each set of called functions until it ends.
    After a rank has failed, the others have ``grace_s`` to end by themselves.

    Raises:
        RankError: A rank raised an exception, died, or still ran at the time limit. All ranks have ended.
        ValueError: ``world_size`` is less than 1, or another process cannot find ``fn``.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    name = getattr(fn, "__qualname__", repr(fn))
    try:
        call = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError) as error:
        raise ValueError(
            f"run_ranks cannot send {name} to other processes ({error}); move it to the top of its module "
            "and pass captured values as arguments"
        ) from None
    preparation = spawn.get_preparation_data("rank")
    del preparation["authkey"]  # which cannot be sent
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        given = timeout_s, grace_s, dict(env or {}), tuple(preload), preparation
        job = _Job(call, world_size, *given, Path(folder))
        ranks, failures = _failures(job, _run_in_server(job))
        files = [job.folder / f"{rank}.log" for rank in range(world_size)]
        tails = [file.read_text(errors="replace").rstrip()[-6000:] if file.exists() else "" for file in files]
        logs = [f"output of rank {rank}:\n{tail}" for rank, tail in enumerate(tails) if tail]
        if ranks:
            raise RankError(f"{name} on {world_size} ranks: " + "\n".join([*failures, *logs]), ranks)
        print(*logs, sep="\n", end="\n" if logs else "")  # pytest shows it if the test fails afterwards
        return [pickle.loads((job.folder / f"{rank}.result").read_bytes()) for rank in range(world_size)]


def _failures(job: _Job, exit_codes: dict[int, int]) -> tuple[list[int], list[str]]:
    """Return the ranks that failed, and what happened to them, the likely cause first."""
    returned = [(job.folder / f"{rank}.result").exists() for rank in range(job.world_size)]
    failures = []
    for rank, code in exit_codes.items():
        if code or not returned[rank]:
            end = f"was ended by signal {-code}" if code < 0 else f"exited with code {code} without a result"
            file = job.folder / f"{rank}.failure"
            # A rank that died is a likelier cause than the earliest exception.
            time_s, end = pickle.loads(file.read_bytes()) if file.exists() else (0.0, end)
            failures.append((time_s, rank, f"rank {rank} {end}"))
    failures.sort()
    ranks, texts = [rank for _, rank, _ in failures], [text for *_, text in failures]
    unfinished = [rank for rank in range(job.world_size) if rank not in exit_codes]
    if unfinished and not any(exit_codes.values()):
        # Ranks that have returned a result only wait for the others.
        ranks = [rank for rank in unfinished if not returned[rank]] or unfinished
        numbers = ", ".join(map(str, ranks))
        texts.insert(0, f"time-out after {job.timeout_s:g} s; still running: rank {numbers}")
    return ranks, texts


_servers: dict[tuple[str, ...], Connection] = {}


def _run_in_server(job: _Job) -> dict[int, int]:
    called = tuple(entry for entry in job.preload if ":" in entry)
    server = _servers.get(called)
    if server is None or server.closed or server.poll():  # An idle server says nothing, unless it died.
        server, theirs = Pipe()
        atexit.register(server.close)  # before multiprocessing waits for the server's end
        # With Python's output unbuffered, a rank that dies has printed everything.
        with theirs, patch.dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONUNBUFFERED="1"):
            get_context("spawn").Process(target=_serve, args=(theirs,)).start()
        _servers[called] = server
    try:
        server.send(job)
        answer = server.recv()
    except BaseException as error:
        server.close()  # It then ends the ranks and itself, also after Ctrl-C.
        if isinstance(error, EOFError | OSError):
            raise RuntimeError("the fork server died") from error
        raise
    if isinstance(answer, str):
        raise RuntimeError(f"preloading {job.preload} failed in the fork server:\n{answer}")
    return answer


def _serve(caller: Connection) -> None:
    """Be the server: run jobs until the caller ends or closes the connection."""
    os.setsid()  # Only the caller gets Ctrl-C.
    called: set[str] = set()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            job = caller.recv()
            caller.send(_prepare(job, called) or _run(job, caller))
    os._exit(0)  # skips Python's clean-up, during which some libraries print errors


def _prepare(job: _Job, called: set[str]) -> str:
    """Import what ranks would import, and call functions that were not called before; return what fails."""
    num_known = len(sys.modules)
    try:
        spawn.prepare(job.preparation)
        for entry in job.preload:
            module, _, function = entry.partition(":")
            imported = importlib.import_module(module)
            if function and entry not in called:
                getattr(imported, function)()
                called.add(entry)
    except BaseException:
        return traceback.format_exc()
    with contextlib.suppress(Exception):  # which the ranks report
        pickle.loads(job.call)
    if len(sys.modules) > num_known:
        gc.collect()
        gc.freeze()  # the garbage collector then does not touch the shared pages, which would copy them
    return ""


def _run(job: _Job, caller: Connection) -> dict[int, int]:
    """Return the exit codes of the ranks that end within the limits; signals are negative. End the others."""
    end_s = time.monotonic() + job.timeout_s
    with socket.create_server(("127.0.0.1", 0), backlog=max(128, job.world_size)) as listener:
        pids = [os.fork() or _be_rank(rank, job, end_s, listener, caller) for rank in range(job.world_size)]
    for pid in pids:
        os.setpgid(pid, pid)  # as the rank itself does, if that comes first
    running = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
    exit_codes: dict[int, int] = {}
    end_s += 0.1  # in which the ranks print where they hang
    while running:
        ready: list[Any] = wait([caller, *running], max(0.0, end_s - time.monotonic()))
        is_over = not ready or caller in ready
        for descriptor in tuple(running) if is_over else ready:
            rank = running.pop(descriptor)
            os.close(descriptor)
            # Processes that a rank started and left, such as checkpoint writers, end with it.
            os.killpg(pids[rank], signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
            if not is_over:
                exit_codes[rank] = code
        if any(exit_codes.values()):
            end_s = min(end_s, time.monotonic() + job.grace_s)
    return exit_codes


def _be_rank(rank: int, job: _Job, end_s: float, listener: socket.socket, caller: Connection) -> NoReturn:
    exit_code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a rank ends with the server
        os.setpgid(0, 0)
        caller.close()
        log = os.open(job.folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable()
        faulthandler.dump_traceback_later(max(0.01, end_s - time.monotonic()))  # prints where the rank hangs
        import torch.distributed as dist

        # The server's limit comes before that of collectives, which would blame the ranks that wait.
        (host, port), limit = listener.getsockname(), datetime.timedelta(seconds=job.timeout_s + 5)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
        numbers |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), job.world_size)
        os.environ.update({name: str(number) for name, number in numbers.items()})
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.update({"MASTER_ADDR": host, **job.env})
        # Rank 0 serves the store on the inherited socket, so that no port has to be guessed.
        serves: dict[str, Any] = {"is_master": rank == 0, "master_listen_fd": listener.detach()}
        store = dist.TCPStore(host, port, job.world_size, timeout=limit, wait_for_workers=False, **serves)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size, timeout=limit)
        dist.barrier()  # gloo fails on a rank whose peer destroys the group before both have connected
        function, arguments = pickle.loads(job.call)
        result = pickle.dumps(function(rank, job.world_size, *arguments))
        (job.folder / f"{rank}.result").write_bytes(result)
        if dist.is_initialized():
            dist.barrier()  # Rank 0 serves the store, so no rank may leave before all ranks have finished.
            dist.destroy_process_group()
        exit_code = 0
    except BaseException:
        failure = (time.monotonic(), f"raised:\n{traceback.format_exc().rstrip()}")
        (job.folder / f"{rank}.failure").write_bytes(pickle.dumps(failure))
    finally:
        os._exit(exit_code)
