"""Runs a function on the ranks of a new process group within a fraction of a second."""

import atexit
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from megatron_fssdp.testing.fork_server import JobReport
from megatron_fssdp.testing.function_reference import FunctionReference
from megatron_fssdp.testing.rank_job import RankFailure, RankJob

# torch.testing and the optimizers import torch._dynamo on their first use. Without preloading, this costs
# every rank of every call almost a second.
DEFAULT_PRELOAD = ("numpy", "torch", "torch.distributed", "torch._dynamo")
_GRACE_S = 0.1
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


class RankTimeoutError(RankError):
    """Some ranks were still running when the time limit was reached."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = DEFAULT_PRELOAD,
    backend: str = "gloo",
    grace_s: float = _GRACE_S,
    context: Callable[..., Any] | None = None,
    context_options: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank of a new process group and return the results.

    The ranks are forked from a server process that has already imported the libraries. This process keeps one
    server for each ``preload`` until it ends. The default process group exists while ``fn`` runs.

    Args:
        fn: Module-level function to call. Closures are refused.
        world_size: Number of ranks.
        *args: Picklable arguments, the same for every rank.
        timeout_s: Time limit of the call and of every collective in it, in seconds.
        env: Environment variables of the ranks. Variables that libraries read at import, such as
            OMP_NUM_THREADS (always 1), cannot be set here.
        preload: Entries that the server runs before the first fork, in order. "module" is imported.
            "module:function" is imported, and then the function is called.
        backend: Backend of the default process group.
        grace_s: Seconds that the other ranks have to end by themselves after a rank has failed.
        context: Module-level function that returns a context manager, which is entered around ``fn`` on each
            rank.
        context_options: Keyword arguments of ``context``.

    Returns:
        The return values of ``fn``, in the order of ranks. They must be picklable.

    Raises:
        RankError: A rank raised an exception or died. All other ranks have been ended.
        RankTimeoutError: The time limit was reached. The message names the ranks that still ran.
        ValueError: ``world_size`` is less than 1, or another process cannot find ``fn`` or ``context``.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    function = FunctionReference.of(fn)
    context_reference = FunctionReference.of(context) if context is not None else None
    run_dir = tempfile.mkdtemp(prefix="ranks-")
    try:
        job = RankJob(
            function=function,
            arguments=pickle.dumps(args),
            world_size=world_size,
            backend=backend,
            timeout_s=timeout_s,
            env={name: str(value) for name, value in (env or {}).items()},
            cwd=os.getcwd(),
            sys_path=_import_path(),
            run_dir=run_dir,
            grace_s=grace_s,
            context=context_reference,
            context_options=dict(context_options or {}),
        )
        report = _server(preload).run(job)
        _raise_on_failure(job, report)
        _show_output(job)
        return [pickle.loads(job.result_path(rank).read_bytes()) for rank in range(world_size)]
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


class _ForkServerProcess:
    """A fork server process, as the caller sees it."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair()
        self._lock = threading.Lock()
        environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        code = (
            f"import os, sys; sys.path[:] = {_import_path()!r}; "
            "from megatron_fssdp.testing.fork_server import serve; "
            f"serve({theirs.fileno()}, {preload!r}); "
            "os._exit(0)"  # skips Python's clean-up, during which some libraries print errors
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # only the caller gets Ctrl-C, and it then ends the server
            )
        self._connection = Connection(ours.detach())
        try:
            failure = self._connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise RuntimeError(f"the fork server died while preloading {preload}") from error
        except BaseException:
            self.close()
            raise
        if failure:
            self.close()
            raise RuntimeError(f"preloading {preload} failed in the fork server:\n{failure}")

    @property
    def alive(self) -> bool:
        return not self._connection.closed and self._process.poll() is None

    def run(self, job: RankJob) -> JobReport:
        with self._lock:
            try:
                self._connection.send(job)
                if not self._connection.poll(job.timeout_s + job.grace_s + _MARGIN_S):
                    raise RuntimeError("the fork server does not answer")
                report = self._connection.recv()
            except (EOFError, OSError) as error:
                self.close()
                raise RuntimeError("the fork server died during a job") from error
            except BaseException:
                # The call was interrupted. Closing the connection makes the server end the ranks and itself.
                self.close()
                raise
        assert isinstance(report, JobReport)
        return report

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_servers: dict[tuple[str, ...], _ForkServerProcess] = {}
_servers_lock = threading.Lock()


def _server(preload: Sequence[str]) -> _ForkServerProcess:
    key = tuple(preload)
    if "pytest" in sys.modules:
        key = (
            *key,
            "pytest",
        )  # every test file imports pytest, and one import in the server is cheaper than one on every rank
    with _servers_lock:
        if key not in _servers or not _servers[key].alive:
            _servers[key] = _ForkServerProcess(key)
        return _servers[key]


@atexit.register
def _close_servers() -> None:
    for server in _servers.values():
        if server.alive:
            server.close()


def _import_path() -> list[str]:
    return [path or os.getcwd() for path in sys.path]


def _raise_on_failure(job: RankJob, report: JobReport) -> None:
    failures: list[tuple[float, int, str]] = []
    for rank in range(job.world_size):
        if job.failure_path(rank).exists():
            failure: RankFailure = pickle.loads(job.failure_path(rank).read_bytes())
            failures.append((failure.raised_at_s, rank, f"rank {rank} raised:\n{failure.traceback.rstrip()}"))
        elif rank not in report.unfinished and not job.result_path(rank).exists():
            failures.append((0.0, rank, f"rank {rank} {_describe_exit(report.exit_codes[rank])}"))
    if not failures and not report.timed_out and not any(report.exit_codes):
        return
    # The likely cause comes first: a rank that died without an exception, else the earliest exception.
    failures.sort()
    parts = [text for _, _, text in failures]
    # Ranks that have returned a result only wait for the others.
    running = [r for r in report.unfinished if not job.result_path(r).exists()] or list(report.unfinished)
    if report.timed_out:
        names = ", ".join(str(rank) for rank in running)
        parts.insert(0, f"time-out after {job.timeout_s:g} s; still running: rank {names}")
    elif not failures:
        parts.append(f"ranks ended with exit codes {report.exit_codes} after returning")
    parts += [
        f"output of rank {rank}:\n{text}" for rank in range(job.world_size) if (text := _log(job, rank))
    ]
    message = f"{job.function.qualname} on {job.world_size} ranks: " + "\n".join(parts)
    if report.timed_out:
        raise RankTimeoutError(message, running)
    raise RankError(message, [rank for _, rank, _ in failures])


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"was ended by signal {-code}"
    return f"exited with code {code} and neither returned nor raised"


def _log(job: RankJob, rank: int) -> str:
    path = job.log_path(rank)
    text = path.read_text(errors="replace").rstrip() if path.exists() else ""
    return text if len(text) <= _LOG_TAIL_CHARS else "[...] " + text[-_LOG_TAIL_CHARS:]


def _show_output(job: RankJob) -> None:
    """Print the output of the ranks. pytest shows it if the test fails afterwards."""
    for rank in range(job.world_size):
        if text := _log(job, rank):
            print(f"output of rank {rank}:\n{text}")
