"""Trainings in which some experts of every layer are frozen before the model is wrapped."""

from pathlib import Path
from typing import Any

import pytest

from ..training_run import assert_close, train, train_on_all_ranks, wrap

ARGUMENTS = "{EP2} --train-iters 6"


@pytest.mark.parametrize("strategy", ["fssdp slots=2 overlap_degree=4 reshard_interval=0", "prophet"])
def test_some_frozen_experts_train_as_in_stock_megatron(strategy: str, text_data: Path) -> None:
    """A device can have replicas of trained experts while its own are frozen, and the reverse."""
    stock = train(2, ARGUMENTS, text_data, before=freeze_some)
    assert_close(train(2, ARGUMENTS, text_data, strategy=strategy, before=freeze_some), stock, 1e-6, 1e-5)


def test_moving_owners_among_frozen_experts_is_refused_in_one_line(text_data: Path) -> None:
    runs = train_on_all_ranks(2, ARGUMENTS, text_data, strategy="fssdp", before=freeze_some)
    for run in runs:
        assert run.exit_code == 2
        (line,) = [line for line in run.errors.splitlines() if "[fssdp] error" in line]
        assert "frozen" in line
        assert "reshard_interval=0" in line


# ---------------------------------------------------------------- on the ranks


def freeze_some() -> None:
    """Freeze the first expert of every rank, as a user does between building and wrapping a model."""
    from megatron.core.distributed import DistributedDataParallel

    def wrapped(
        original: Any, self: Any, config: Any, ddp_config: Any, module: Any, *others: Any, **options: Any
    ) -> None:
        for one in module.modules():
            if hasattr(one, "local_experts"):
                one.local_experts[0].requires_grad_(False)
        original(self, config, ddp_config, module, *others, **options)

    wrap(DistributedDataParallel, "__init__", wrapped)
