"""Weights that are copied out and in by name in the middle of a training, after owners have moved."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fssdp.config.errors import ConfigurationError

from ..training_run import assert_close, before_iterations, note, train
from .test_moved_owners import halves

MOVING = "fssdp reshard_interval=2 slots=2 overlap_degree=4"


def test_copies_by_name_are_refused_while_experts_are_elsewhere(text_data: Path) -> None:
    """After :func:`restore_owners` they work, and the training goes on as stock Megatron's."""
    arguments = "{EP2} --train-iters 6"
    stock = train(2, arguments, text_data)
    copied = train(2, arguments, text_data, strategy=MOVING, before=copy_out_and_in)
    assert_close(copied, stock)
    assert len(copied.notes) == 2 * 2
    for refused in copied.notes:
        assert "reshard_interval=0" in refused
        assert "restore_owners" in refused


# ---------------------------------------------------------------- on the ranks


def copy_out_and_in() -> None:
    halves()

    def copy(iteration: int, model: Any, optimizer: Any) -> None:
        from megatron_fssdp import restore_owners

        if iteration == 1:
            assert not restore_owners(model)
        if iteration != 4:
            return
        chunk = model[0]
        for call in (chunk.state_dict, lambda: chunk.load_state_dict({}, strict=False)):
            with pytest.raises(ConfigurationError) as refused:
                call()
            note(str(refused.value))
        assert restore_owners(model)
        kept = {key: one.clone() for key, one in chunk.state_dict().items() if torch.is_tensor(one)}
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.zero_()
        chunk.load_state_dict(kept, strict=False)

    before_iterations(copy)
