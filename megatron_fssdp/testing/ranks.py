"""Runs a function on the ranks of a new process group within a fraction of a second.

A server process imports the libraries once, computes nothing, and forks the ranks of every call.
"""

import contextlib
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

# torch.testing and the optimizers import torch._dynamo on their first use, which takes almost a second.
DEFAULT_PRELOAD = ("numpy", "torch", "torch.distributed", "torch._dynamo")
_DUMP_S = 0.1  # time for ranks that timed out to print where they hang
_MARGIN_S = 30.0  # the server enforces the time limit, and the caller only detects a dead server
_LOG_TAIL_CHARS = 6000


class RankError(RuntimeError):
    """A rank raised an exception, died or exceeded the time limit. The message has tracebacks and output.

    ``ranks`` are those that failed by themselves, or still ran at the time limit.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class _RankJob(NamedTuple):
    call: bytes  # the pickled function and its arguments after rank and world_size
    world_size: int
    timeout_s: float
    grace_s: float
    env: dict[str, str]
    preparation: dict[str, Any]  # import path, working directory and main module, as multiprocessing has them
    folder: Path  # for <rank>.log, and the pickled <rank>.result or <rank>.failure (its time and traceback)


class _JobReport(NamedTuple):
    exit_codes: list[int]  # of every rank; signals are negative
    unfinished: list[int]  # ranks that the server ended
    timed_out: bool


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 300,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = DEFAULT_PRELOAD,
    grace_s: float = 0.1,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on ranks with a gloo process group; return the results in order.

    ``fn`` is a function at the top of a module; its arguments and results are picklable. ``timeout_s`` limits
    the call and every collective in it. ``env`` cannot set what libraries read at import, such as
    OMP_NUM_THREADS (always 1). ``preload`` is what the server imports ("module") or calls ("module:function")
    before the first fork; this process keeps a server for each ``preload`` until it ends. After a rank has
    failed, the others have ``grace_s`` to end by themselves.

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
        job = _RankJob(call, world_size, timeout_s, grace_s, dict(env or {}), preparation, Path(folder))
        report = _server(preload).run(job)
        found = {rank: _end_of_log(job, rank) for rank in range(world_size)}
        logs = [f"output of rank {rank}:\n{text}" for rank, text in found.items() if text]
        _raise_on_failure(f"{name} on {world_size} ranks", job, report, logs)
        print(*logs, sep="\n", end="\n" if logs else "")  # pytest shows it if the test fails afterwards
        return [pickle.loads((job.folder / f"{rank}.result").read_bytes()) for rank in range(world_size)]


class _ForkServer:
    """A fork server, as the caller sees it. It ends with this process."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair()
        path = [entry or os.getcwd() for entry in sys.path]
        code = (
            f"import os, sys; sys.path[:] = {path!r}; "
            f"from {__name__} import serve; serve({theirs.fileno()}, {preload!r}); "
            "os._exit(0)"  # skips Python's clean-up, during which some libraries print errors
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],  # a rank that dies has printed everything
                env=dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # only the caller gets Ctrl-C, and it then ends the server
            )
        self._connection = Connection(ours.detach())
        if failure := self._answer(None):
            self._connection.close()
            raise RuntimeError(f"preloading {preload} failed in the fork server:\n{failure}")

    def run(self, job: _RankJob) -> _JobReport:
        self._connection.send(job)
        return _JobReport(*self._answer(job.timeout_s + job.grace_s + _MARGIN_S))

    def is_alive(self) -> bool:
        return not self._connection.closed and self._process.poll() is None

    def _answer(self, limit_s: float | None) -> Any:
        try:
            if self._connection.poll(limit_s):
                return self._connection.recv()
            raise EOFError
        except BaseException as error:
            # Closing the connection makes the server end the ranks and itself, also after Ctrl-C.
            self._connection.close()
            if isinstance(error, EOFError | OSError):
                raise RuntimeError("the fork server died, or does not answer") from error
            raise


_servers: dict[tuple[str, ...], _ForkServer] = {}


def _server(preload: Sequence[str]) -> _ForkServer:
    # Every test file imports pytest, and one import in the server is cheaper than one on every rank.
    key = (*preload, "pytest") if "pytest" in sys.modules else tuple(preload)
    if key not in _servers or not _servers[key].is_alive():
        _servers[key] = _ForkServer(key)
    return _servers[key]


def _raise_on_failure(what: str, job: _RankJob, report: _JobReport, logs: list[str]) -> None:
    failures: list[tuple[float, int, str]] = []
    for rank, code in enumerate(report.exit_codes):
        file = job.folder / f"{rank}.failure"
        if rank in report.unfinished:
            continue
        if file.exists():
            raised_at_s, text = pickle.loads(file.read_bytes())
            failures.append((raised_at_s, rank, f"rank {rank} raised:\n{text.rstrip()}"))
        elif code < 0:
            failures.append((0.0, rank, f"rank {rank} was ended by signal {-code}"))
        elif code or not file.with_suffix(".result").exists():
            failures.append((0.0, rank, f"rank {rank} exited with code {code} and did not return"))
    failures.sort()  # The likely cause comes first: a rank that died, else the earliest exception.
    ranks, parts = [rank for _, rank, _ in failures], [text for *_, text in failures]
    if report.timed_out:
        # Ranks that have returned a result only wait for the others.
        running = [rank for rank in report.unfinished if not (job.folder / f"{rank}.result").exists()]
        ranks = running or report.unfinished
        numbers = ", ".join(map(str, ranks))
        parts.insert(0, f"time-out after {job.timeout_s:g} s; still running: rank {numbers}")
    if ranks:
        raise RankError(f"{what}: " + "\n".join([*parts, *logs]), ranks)


def _end_of_log(job: _RankJob, rank: int) -> str:
    text = (job.folder / f"{rank}.log").read_text(errors="replace").rstrip()
    return text if len(text) <= _LOG_TAIL_CHARS else "[...] " + text[-_LOG_TAIL_CHARS:]


# What follows runs in the server, or on a rank.


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
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # ranks at the time limit get it, and print where they hang
    gc.collect()
    gc.freeze()  # the garbage collector then does not touch the shared pages, which would copy them
    connection.send("")
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            connection.send(_run(connection.recv(), connection))


def _run(job: _RankJob, caller: Connection) -> _JobReport:
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
    return _JobReport(exit_codes, list(running.values()), timed_out)


def _reap(pid: int, descriptor: int) -> int:
    os.close(descriptor)
    # End processes that the rank started and left, such as checkpoint writers.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork(job: _RankJob, rank: int, listener: socket.socket, caller: Connection) -> int:
    if pid := os.fork():
        return pid
    exit_code = 1
    try:
        os.setpgid(0, 0)
        caller.close()
        log = os.open(job.folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            _call(job, rank, listener)
            exit_code = 0
        except BaseException:
            failure = pickle.dumps((time.monotonic(), traceback.format_exc()))
            (job.folder / f"{rank}.failure").write_bytes(failure)
    finally:
        os._exit(exit_code)


def _call(job: _RankJob, rank: int, listener: socket.socket) -> None:
    import torch.distributed as dist

    spawn.prepare(job.preparation)
    port, limit = listener.getsockname()[1], datetime.timedelta(seconds=job.timeout_s)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ.update({"LOCAL_WORLD_SIZE": str(job.world_size), "MASTER_ADDR": "127.0.0.1", **job.env})
    served: dict[str, Any] = {}
    if rank == 0:  # It serves the store on the inherited socket, so that no port has to be guessed.
        served = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    else:
        listener.close()
    store = dist.TCPStore("127.0.0.1", port, job.world_size, timeout=limit, **served)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size, timeout=limit)
    function, arguments = pickle.loads(job.call)
    result = pickle.dumps(function(rank, job.world_size, *arguments))
    (job.folder / f"{rank}.result").write_bytes(result)
    if dist.is_initialized():
        dist.barrier()  # Rank 0 serves the store, so no rank may leave before all ranks have finished.
        dist.destroy_process_group()
