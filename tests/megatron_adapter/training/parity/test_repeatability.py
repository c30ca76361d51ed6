"""The same seed and layout give bitwise equal losses, in whichever order transfers arrive."""

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from ...training_run import BATCH16, DISTRIBUTED, assert_equal, wrap
from .comparison import Layout, trained

FSSDP = "fssdp slots=2 overlap_degree=4 nodes=2 reshard_interval=2"
RUNS = {
    "several_micro_batches": Layout(4, 4, BATCH16, FSSDP),
    "rematerialized_balanced_bf16": Layout(
        4, 4, f"--bf16 {DISTRIBUTED}", f"{FSSDP} rematerialize=true SHARES=exact"
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param("several_micro_batches", marks=pytest.mark.slow), "rematerialized_balanced_bf16"]
)
def test_a_repeated_run_has_bitwise_equal_losses(name: str, text_data: Path) -> None:
    layout = RUNS[name]
    first = trained(layout, layout.settings, text_data)
    assert_equal(trained(layout, layout.settings, text_data, before=let_messages_be_late), first)


def let_messages_be_late() -> None:
    """Delay some steps of each rank's transfers, by different times on each rank."""
    from megatron_fssdp.collectives.sparse import sparse_transfer

    draw = random.Random(int(os.environ["RANK"]))

    def post_late(post: Any, *arguments: Any) -> Any:
        if draw.random() < 0.3:
            time.sleep(draw.random() * 0.01)
        return post(*arguments)

    wrap(sparse_transfer, "post", post_late)
