"""The process groups of a session, and the form of planning kernels on all ranks of a pipeline stage."""

from pathlib import Path
from typing import Any

import torch

from ..training_run import note, train_on_all_ranks, wrap


def note_timeouts() -> None:
    """Note the time-outs of the two groups of the same ranks, before each iteration."""
    from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime

    def begin_iteration(begin: Any, self: MoERuntime, *args: object) -> None:
        groups = self.layers[0].groups
        assert groups.transfers is not None
        for group in (groups.expert_parallel, groups.transfers):
            note(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
        begin(self, *args)

    wrap(MoERuntime, "begin_iteration", begin_iteration)


def test_process_groups_of_transfers_have_megatrons_timeout(text_data: Path) -> None:
    arguments = "{EP2} --train-iters 2 --distributed-timeout-minutes 7"
    for run in train_on_all_ranks(2, arguments, text_data, strategy="fssdp", before=note_timeouts):
        assert run.notes == (420, 420, 420, 420)
