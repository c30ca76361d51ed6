"""Ranks with different settings are refused on all ranks, before they can wait for each other."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fssdp.config.cluster_files import cluster_yaml, load_cluster

from ..training_run import train_on_all_ranks

ARGUMENTS = "--expert-model-parallel-size 2 --train-iters 2 --moe-strategy fssdp"
PARM = "--moe-strategy parm --moe-strategy-set cluster=cluster.yaml"


def other_file() -> None:
    """Let each rank find another file of settings, as on nodes that do not share their files."""
    rank = os.environ["RANK"]
    folder = Path(os.environ["FOLDER"]) / rank
    folder.mkdir()
    (folder / "strategy.yaml").write_text(f"slots: {1 + int(rank)}\n")
    os.chdir(folder)


def other_cluster() -> None:
    """Let each rank find another description of the cluster; rank 1 finds none if ``MISSING`` is set."""
    rank = int(os.environ["RANK"])
    folder = Path(os.environ["FOLDER"]) / str(rank)
    folder.mkdir()
    if rank == 0 or "MISSING" not in os.environ:
        cluster = load_cluster(("hecate-a", "hecate-b")[rank])
        (folder / "cluster.yaml").write_text(cluster_yaml(cluster))
    os.chdir(folder)


def no_cluster() -> None:
    os.environ["MISSING"] = "1"
    other_cluster()


def other_queues() -> None:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(1 + int(os.environ["RANK"]))


@pytest.mark.parametrize(
    ("before", "more", "message"),
    [
        (other_file, "--moe-strategy-config strategy.yaml", "slots: got 1 on rank 0 and 2 on rank 1"),
        (other_cluster, PARM, "cluster description: got one with the digest "),
        (no_cluster, PARM, "cluster.yaml: no such file"),
        (other_queues, "", "CUDA_DEVICE_MAX_CONNECTIONS is 1: got True on rank 0 and False on rank 1"),
    ],
)
def test_ranks_with_other_settings_are_refused(
    before: Callable[[], None], more: str, message: str, text_data: Path, tmp_path: Path
) -> None:
    runs = train_on_all_ranks(
        2,
        f"{ARGUMENTS} {more}",
        text_data,
        before=before,
        env={"FOLDER": str(tmp_path)},
        timeout_s=120,
    )
    assert [run.exit_code for run in runs] == [2, 2]
    assert all(message in run.errors for run in runs)
