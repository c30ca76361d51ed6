"""What one rank refuses, and ranks with different settings, end all ranks with one line."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fssdp.config.cluster_files import cluster_yaml, load_cluster
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.training.equal_settings import refused_together
from megatron_fssdp.testing import run_ranks
from megatron_fssdp.testing.parallel_state import MEGATRON_PRELOAD

from ..training_run import train_on_all_ranks, wrap

SHORT = "{EP2} --train-iters 2"
PARM = "--moe-strategy parm --moe-strategy-set cluster=cluster.yaml"


def enter_own_folder() -> tuple[int, Path]:
    """Let each rank find other files, as on nodes that do not share them."""
    rank = int(os.environ["RANK"])
    folder = Path(os.environ["FOLDER"]) / str(rank)
    folder.mkdir()
    os.chdir(folder)
    return rank, folder


def other_file() -> None:
    rank, folder = enter_own_folder()
    (folder / "strategy.yaml").write_text(f"slots: {1 + rank}\n")


def other_cluster() -> None:
    """Rank 1 finds no description of the cluster if ``MISSING`` is set."""
    rank, folder = enter_own_folder()
    if rank == 0 or "MISSING" not in os.environ:
        cluster = load_cluster(("hecate-a", "hecate-b")[rank])
        (folder / "cluster.yaml").write_text(cluster_yaml(cluster))


def no_cluster() -> None:
    os.environ["MISSING"] = "1"
    other_cluster()


def other_queues() -> None:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(1 + int(os.environ["RANK"]))


def other_routing() -> None:
    """Let each rank's command line ask for another number of experts for a token."""
    from megatron_fssdp.megatron_adapter.training import training_hooks

    def args_of_rank(get_args: Any) -> Any:
        args = get_args()
        args.moe_router_topk = 1 + int(os.environ["RANK"])
        return args

    wrap(training_hooks, "get_args", args_of_rank)


@pytest.mark.parametrize(
    ("before", "more", "message"),
    [
        (other_file, "--moe-strategy-config strategy.yaml", "slots: got 1 on rank 0 and 2 on rank 1"),
        (other_cluster, PARM, "cluster description: got one with the digest "),
        (no_cluster, PARM, "cluster.yaml: no such file"),
        (other_routing, "", "--moe-router-topk: got 1 on rank 0 and 2 on rank 1"),
        (other_queues, "", "CUDA_DEVICE_MAX_CONNECTIONS is 1: got True on rank 0 and False on rank 1"),
    ],
)
def test_ranks_with_other_settings_are_refused(
    before: Callable[[], None], more: str, message: str, text_data: Path, tmp_path: Path
) -> None:
    options: Any = {"before": before, "env": {"FOLDER": str(tmp_path)}, "timeout_s": 120}
    runs = train_on_all_ranks(2, f"{SHORT} --moe-strategy fssdp {more}", text_data, **options)
    assert [run.exit_code for run in runs] == [2, 2]
    assert all(message in run.errors for run in runs)


def refuse_on(rank: int, world_size: int, refusing: tuple[int, ...]) -> str:
    """Return the message with which a rank ends; empty if it goes on."""
    try:
        with refused_together():
            if rank in refusing:
                raise ConfigurationError(f"found by rank {rank}")
    except ConfigurationError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize(
    ("refusing", "messages"),
    [
        ((1,), ["found by rank 1"] * 3),
        ((1, 2), ["found by rank 1", "found by rank 1", "found by rank 2"]),
        ((), [""] * 3),
    ],
)
def test_all_ranks_end_with_a_reason(refusing: tuple[int, ...], messages: list[str]) -> None:
    assert run_ranks(refuse_on, 3, refusing, preload=MEGATRON_PRELOAD) == messages


def test_all_ranks_refuse_a_folder_of_records_that_rank_0_cannot_write(
    text_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    options: Any = {"strategy": f"ep record_dir={tmp_path / 'file'}", "timeout_s": 120, "grace_s": 10}
    runs = train_on_all_ranks(2, SHORT, text_data, **options)
    assert [run.exit_code for run in runs] == [2, 2]
    assert all("record_dir" in run.errors for run in runs)
