"""The same seed and layout give bitwise equal losses, in whichever order transfers arrive."""

from pathlib import Path
from typing import Any

import pytest

from ...training_run import train

FSSDP = (
    "--moe-strategy fssdp --moe-strategy-set slots=2 --moe-strategy-set overlap_degree=4 "
    "--moe-strategy-set nodes=2 --moe-strategy-set reshard_interval=2"
)
# name: (ranks, arguments)
RUNS = {
    "several_micro_batches": (4, "--expert-model-parallel-size 4 --global-batch-size 16"),
    "rematerialized_balanced_bf16": (
        4,
        "--expert-model-parallel-size 4 --bf16 --use-distributed-optimizer "
        "--moe-strategy-set rematerialize=true --moe-strategy-set dispatch_policy=exact",
    ),
}
SLOW = ("several_micro_batches",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RUNS],
)
def test_a_repeated_run_has_bitwise_equal_losses(name: str, text_data: Path) -> None:
    world_size, arguments = RUNS[name]
    arguments = f"{arguments} --train-iters 6 {FSSDP}"
    first = train(world_size, arguments, text_data)
    again = train(world_size, arguments, text_data, before=let_messages_be_late)
    assert again.losses == first.losses
    assert again.grad_norms == first.grad_norms


def let_messages_be_late() -> None:
    """Delay some steps of each rank's transfers, by different times on each rank."""
    import os
    import random
    import time

    from megatron_fssdp.collectives.messages import Poster

    post = Poster.post
    draw = random.Random(int(os.environ["RANK"]))

    def post_late(*arguments: Any) -> Any:
        if draw.random() < 0.3:
            time.sleep(draw.random() * 0.01)
        return post(*arguments)

    Poster.post = post_late
