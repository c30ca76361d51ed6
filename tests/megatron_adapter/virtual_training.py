"""Trainings through Megatron's command line on virtual CUDA devices, and the same ones on CPU ranks."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.testing import run_ranks
from megatron_fssdp.testing.parallel_state import MEGATRON_PRELOAD
from tests.megatron_adapter.training_run import (
    GPT,
    Model,
    TrainingRun,
    command_line,
    relative_difference,
    train_on_all_ranks,
    train_on_rank,
    without_variables,
)

WORLD_SIZE = 4
_LIMIT_S = 400.0

# The server imports Megatron without the patches for CPU ranks.
_PRELOAD = tuple(entry for entry in MEGATRON_PRELOAD if not entry.endswith(":install"))

# Parameters are drawn on the host, as the launcher has it on CPU ranks.
VIRTUAL_GPT = Model(
    GPT.script,
    GPT.arguments.replace("--distributed-backend gloo", "")
    + " --num-layers 3 --disable-bias-linear --train-iters 3",
)


@dataclass(frozen=True)
class VirtualRun:
    """What one rank saw of a training on a virtual device.

    Attributes:
        training: What a rank sees of every training.
        findings: Findings of the device that are not known ones of Megatron's own code.
        known: Number of known findings, by file of Megatron.
        host_syncs: Number of host synchronizations, by name and place.
        counts: Number of log entries, by kind.
    """

    training: TrainingRun
    findings: tuple[str, ...]
    known: dict[str, int]
    host_syncs: dict[str, int]
    counts: dict[str, int]


def train_virtually(
    arguments: str, data: Path, *, before: Callable[[], None] | None = None
) -> list[VirtualRun]:
    """As :func:`train_on_all_ranks`, on virtual devices with NCCL as Megatron's backend."""
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "MEGATRON_FSSDP_DEVICE": "cuda"}
    environment["LOCAL_WORLD_SIZE"] = str(WORLD_SIZE)
    arguments, variables = without_variables(arguments)
    environment |= variables
    argv, options = command_line(VIRTUAL_GPT, arguments, data), {"timeout_s": _LIMIT_S, "preload": _PRELOAD}
    return run_ranks(_train_on_device, WORLD_SIZE, argv, before, env=environment, **options)


def train_on_cpu(arguments: str, data: Path) -> list[TrainingRun]:
    """The same training on CPU ranks."""
    arguments = f"{arguments} --distributed-backend gloo"
    return train_on_all_ranks(WORLD_SIZE, arguments, data, model=VIRTUAL_GPT, timeout_s=_LIMIT_S)


def assert_same_without_findings(
    arguments: str, data: Path, *, tolerance: float | None = None
) -> list[VirtualRun]:
    """Train on virtual devices and on CPU ranks: no findings; equal losses and gradient norms.

    With a tolerance, losses may have this relative difference, and norms may differ.

    Returns:
        What the ranks with virtual devices saw.
    """
    runs = train_virtually(arguments, data)
    assert_clean(runs)
    wanted = train_on_cpu(arguments, data)
    assert wanted[-1].losses
    for run, other in zip(runs, wanted, strict=True):
        got = run.training
        if tolerance is None:
            assert (got.losses, got.grad_norms) == (other.losses, other.grad_norms)
        elif other.losses:
            assert relative_difference(got.losses, other.losses) <= tolerance
    return runs


def assert_clean(runs: list[VirtualRun]) -> None:
    """All ranks have succeeded, on the CUDA branches, and no device has findings."""
    for rank, run in enumerate(runs):
        assert not run.training.exit_code, f"rank {rank}:\n{run.training.errors[-3000:]}"
        assert run.counts["operator"] > 0
        assert not run.findings, f"rank {rank}:\n" + "\n".join(run.findings)


def _train_on_device(
    rank: int, world_size: int, argv: list[str], before: Callable[[], None] | None
) -> VirtualRun:
    from megatron_fssdp.megatron_adapter.cpu import cpu_runtime
    from tests.support.virtual_cuda.programs.known_findings import explained
    from tests.support.virtual_cuda.programs.megatron_loop import megatron_on_virtual_cuda

    with megatron_on_virtual_cuda() as device:
        training = train_on_rank(rank, world_size, argv, before, True)
        device.finish_all()
    assert not cpu_runtime._installed
    unknown, known = explained(device.findings)
    return VirtualRun(
        training,
        tuple(map(str, unknown)),
        dict(Counter(row.file for _, row in known)),
        dict(Counter(f"{sync.what} at [{sync.place}]" for sync in device.host_syncs)),
        dict(device.counts),
    )
