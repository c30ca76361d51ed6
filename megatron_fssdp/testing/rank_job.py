"""Describes one job for the ranks of a process group, and runs it on each rank."""

import contextlib
import datetime
import faulthandler
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fssdp.testing.function_reference import FunctionReference


@dataclass(frozen=True)
class RankJob:
    """One function call on every rank of a new process group.

    Attributes:
        function: Function to call, as ``function(rank, world_size, *arguments)``.
        arguments: Pickled tuple of the further arguments.
        world_size: Number of ranks.
        backend: Backend of the default process group.
        timeout_s: Time limit of the whole job and of each collective in it, in seconds.
        env: Environment variables of every rank. They win over those of the server.
        cwd: Working directory of the ranks.
        sys_path: Import path of the ranks.
        run_dir: Existing folder for logs, results and failures. Only this job uses it.
        grace_s: Seconds that the other ranks have to end by themselves after a rank has failed.
        context: Reference to a context manager to enter around the function, or None.
        context_options: Keyword arguments of ``context``.
    """

    function: FunctionReference
    arguments: bytes
    world_size: int
    backend: str
    timeout_s: float
    env: dict[str, str]
    cwd: str
    sys_path: list[str]
    run_dir: str
    grace_s: float
    context: FunctionReference | None = None
    context_options: dict[str, Any] = field(default_factory=dict)

    def log_path(self, rank: int) -> Path:
        """Return the path of the file with everything that the rank wrote to stdout and stderr."""
        return Path(self.run_dir) / f"rank{rank}.log"

    def result_path(self, rank: int) -> Path:
        """Return the path of the rank's pickled return value.

        The file exists only if the function returned.
        """
        return Path(self.run_dir) / f"rank{rank}.result"

    def failure_path(self, rank: int) -> Path:
        """Return the path of the rank's pickled :class:`RankFailure`.

        The file exists only if the rank raised.
        """
        return Path(self.run_dir) / f"rank{rank}.failure"


@dataclass(frozen=True)
class RankFailure:
    """An exception that ended a rank.

    Attributes:
        raised_at_s: Time of the exception on the monotonic clock, in seconds. The ranks of a job share this
            clock.
        traceback: Formatted traceback of the exception.
    """

    raised_at_s: float
    traceback: str


def run_rank(job: RankJob, rank: int, listener: socket.socket) -> int:
    """Run the job on this rank, in the rank's own process.

    Args:
        job: The job to run.
        rank: Number of this rank.
        listener: Listening socket on the loopback interface, which every rank inherits. Rank 0 serves the
            rendezvous store on it, so that no port has to be guessed.

    Returns:
        The exit code of the rank: 0 if the function returned, 1 if it raised.
    """
    _redirect_output(job.log_path(rank))
    try:
        result = _call(job, rank, listener)
        payload = pickle.dumps(result)
        _write(job.result_path(rank), payload)
        _leave_process_group()
        return 0
    except BaseException:
        failure = RankFailure(time.monotonic(), traceback.format_exc())
        _write(job.failure_path(rank), pickle.dumps(failure))
        return 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()


def _call(job: RankJob, rank: int, listener: socket.socket) -> Any:
    os.chdir(job.cwd)
    sys.path[:] = job.sys_path
    port = listener.getsockname()[1]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ.update(job.env)
    _enter_process_group(job, rank, listener)
    function = job.function.resolve()
    arguments = pickle.loads(job.arguments)
    context: AbstractContextManager[Any] = contextlib.nullcontext()
    if job.context is not None:
        context = job.context.resolve()(**job.context_options)
    with context:
        return function(rank, job.world_size, *arguments)


def _enter_process_group(job: RankJob, rank: int, listener: socket.socket) -> None:
    import torch
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=job.timeout_s)
    port = listener.getsockname()[1]
    if rank == 0:
        # From now on the store owns the descriptor.
        descriptor = listener.detach()
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            job.world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    else:
        listener.close()
        store = dist.TCPStore("127.0.0.1", port, job.world_size, is_master=False, timeout=timeout)
    if job.backend != "gloo":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.world_size, timeout=timeout)


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        # Rank 0 serves the store, so no rank may leave before all ranks have finished.
        dist.barrier()
        dist.destroy_process_group()


def _redirect_output(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8", errors="replace")  # noqa: SIM115
    # The server sends this signal to ranks that exceed the time limit. The traceback shows where they hang.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    faulthandler.enable(file=sys.stderr)


def _write(path: Path, payload: bytes) -> None:
    """Write a file so that a reader sees either the complete file or no file."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_bytes(payload)
    partial.rename(path)
