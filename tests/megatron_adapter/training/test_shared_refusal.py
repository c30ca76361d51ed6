"""What one rank refuses ends all ranks with one line."""

from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.training.equal_settings import refused_together
from megatron_fssdp.testing import run_ranks

from ..training_run import train_on_all_ranks


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
    assert run_ranks(refuse_on, 3, refusing) == messages


def test_all_ranks_refuse_a_folder_of_records_that_rank_0_cannot_write(
    text_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    runs = train_on_all_ranks(
        2,
        "--expert-model-parallel-size 2 --train-iters 2 --moe-strategy ep "
        f"--moe-strategy-set record_dir={tmp_path / 'file'}",
        text_data,
        timeout_s=120,
        grace_s=10,
    )
    assert [run.exit_code for run in runs] == [2, 2]
    assert all("record_dir" in run.errors for run in runs)
