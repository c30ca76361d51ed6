"""Runs a function on the ranks of a new process group within a fraction of a second."""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_fssdp.testing.fork_server import JobReport, RankJob

# torch.testing and the optimizers import torch._dynamo on their first use. Without preloading, this costs
# every rank of every call almost a second.
DEFAULT_PRELOAD = ("numpy", "torch", "torch.distributed", "torch._dynamo")
_MARGIN_S = 30.0  # the server enforces the time limit, and the caller only detects a dead server
_LOG_TAIL_CHARS = 6000


class RankError(RuntimeError):
    """A rank raised an exception, died or exceeded the time limit.

    The message contains the ranks' tracebacks and output.

    Attributes:
        ranks: Ranks that failed by themselves, or that still ran when the time limit was reached.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 300,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = DEFAULT_PRELOAD,
    grace_s: float = 0.1,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank of a new process group and return the results.

    The ranks are forked from a server process that has already imported the libraries. This process keeps one
    server for each ``preload`` until it ends. The default process group (gloo) exists while ``fn`` runs.

    Args:
        fn: Function at the top of a module.
        world_size: Number of ranks.
        *args: Picklable arguments, the same for every rank.
        timeout_s: Time limit of the call and of every collective in it, in seconds.
        env: Environment variables of the ranks. Variables that libraries read at import, such as
            OMP_NUM_THREADS (always 1), cannot be set here.
        preload: Entries that the server runs before the first fork, in order. "module" is imported.
            "module:function" is imported, and then the function is called.
        grace_s: Seconds that the other ranks have to end by themselves after a rank has failed.

    Returns:
        The return values of ``fn``, in the order of ranks. They must be picklable.

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
        job = RankJob(call, world_size, timeout_s, grace_s, dict(env or {}), preparation, Path(folder))
        report = _server(preload).run(job)
        logs = [f"output of rank {rank}:\n{text}" for rank in range(world_size) if (text := _log(job, rank))]
        _raise_on_failure(f"{name} on {world_size} ranks", job, report, logs)
        print(*logs, sep="\n", end="\n" if logs else "")  # pytest shows it if the test fails afterwards
        return [pickle.loads((job.folder / f"{rank}.result").read_bytes()) for rank in range(world_size)]


class _ForkServer:
    """A fork server process, as the caller sees it. It ends when this process ends."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair()
        path = [entry or os.getcwd() for entry in sys.path]
        code = (
            f"import os, sys; sys.path[:] = {path!r}; "
            "from megatron_fssdp.testing.fork_server import serve; "
            f"serve({theirs.fileno()}, {preload!r}); "
            "os._exit(0)"  # skips Python's clean-up, during which some libraries print errors
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # only the caller gets Ctrl-C, and it then ends the server
            )
        self._connection = Connection(ours.detach())
        if failure := self._answer(None):
            self._connection.close()
            raise RuntimeError(f"preloading {preload} failed in the fork server:\n{failure}")

    def run(self, job: RankJob) -> JobReport:
        """Run a job, and wait for its end."""
        self._connection.send(job)
        report: JobReport = self._answer(job.timeout_s + job.grace_s + _MARGIN_S)
        return report

    @property
    def alive(self) -> bool:
        return not self._connection.closed and self.process.poll() is None

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
    if key not in _servers or not _servers[key].alive:
        _servers[key] = _ForkServer(key)
    return _servers[key]


def _raise_on_failure(what: str, job: RankJob, report: JobReport, logs: list[str]) -> None:
    failures: list[tuple[float, int, str]] = []
    for rank, code in enumerate(report.exit_codes):
        if rank in report.unfinished:
            continue
        file = job.folder / f"{rank}.failure"
        if file.exists():
            raised_at_s, text = pickle.loads(file.read_bytes())
            failures.append((raised_at_s, rank, f"rank {rank} raised:\n{text.rstrip()}"))
        elif code or not file.with_suffix(".result").exists():
            told = (
                f"was ended by signal {-code}" if code < 0 else f"exited with code {code} and did not return"
            )
            failures.append((0.0, rank, f"rank {rank} {told}"))
    # The likely cause comes first: a rank that died without an exception, else the earliest exception.
    ranks, parts = [rank for _, rank, _ in sorted(failures)], [text for *_, text in sorted(failures)]
    if report.timed_out:
        # Ranks that have returned a result only wait for the others.
        running = [rank for rank in report.unfinished if not (job.folder / f"{rank}.result").exists()]
        ranks = running or list(report.unfinished)
        parts.insert(
            0, f"time-out after {job.timeout_s:g} s; still running: rank {', '.join(map(str, ranks))}"
        )
    if ranks:
        raise RankError(f"{what}: " + "\n".join([*parts, *logs]), ranks)


def _log(job: RankJob, rank: int) -> str:
    text = (job.folder / f"{rank}.log").read_text(errors="replace").rstrip()
    return text if len(text) <= _LOG_TAIL_CHARS else "[...] " + text[-_LOG_TAIL_CHARS:]
