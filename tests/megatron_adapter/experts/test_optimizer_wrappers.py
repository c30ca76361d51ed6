"""Re-shards under Megatron's less common optimizers: losses are those of stock Megatron, also after a resume.

Megatron needs a package for each of these optimizers. A case is skipped where its package is not installed.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ..training_run import TrainingRun, relative_difference, train_on_all_ranks

MUON = "--optimizer muon --muon-momentum 0.9 --disable-bias-linear"
# name: package, number of ranks, arguments
OPTIMIZERS = {
    "several instances, each with parts": (
        "einops",
        8,
        "--use-distributed-optimizer --num-distributed-optimizer-instances 2 --global-batch-size 16",
    ),
    "several instances, each on one rank": (
        "einops",
        4,
        "--use-distributed-optimizer --num-distributed-optimizer-instances 2",
    ),
    "muon": ("emerging_optimizers", 4, MUON),
    "layer-wise muon": ("emerging_optimizers", 4, f"{MUON} --use-distributed-optimizer"),
}
FSSDP = (
    "--moe-strategy fssdp --moe-strategy-set slots=2 --moe-strategy-set overlap_degree=3 "
    "--moe-strategy-set reshard_interval=2"
)
CHECKPOINT = "--ckpt-format torch_dist --save-interval 4"


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_re_shards_keep_the_losses(name: str, text_data: Path, tmp_path: Path) -> None:
    package, ranks, arguments = OPTIMIZERS[name]
    if find_spec(package) is None:
        pytest.skip(f"Megatron needs {package} for this optimizer")
    arguments = f"--expert-model-parallel-size 2 --bf16 {arguments}"
    (*_, stock), (first, *_, ours) = (
        _train(ranks, f"{arguments} --train-iters 6 {more}", text_data) for more in ("", FSSDP)
    )
    assert any("re-sharded" in message for message in first.messages)
    assert relative_difference(ours.losses, stock.losses) <= 2e-3
    # Resuming continues with owners that have moved.
    if name.startswith("several"):
        return  # Stock Megatron cannot resume it without Transformer Engine or Apex either.
    folder = f"{CHECKPOINT} --save {tmp_path}"
    _train(ranks, f"{arguments} --train-iters 4 {FSSDP} {folder}", text_data)
    more = f"--load {tmp_path} --override-opt_param-scheduler"
    *_, resumed = _train(ranks, f"{arguments} --train-iters 6 {FSSDP} {folder} {more}", text_data)
    assert relative_difference(resumed.losses, stock.losses[4:]) <= 2e-3


@pytest.mark.slow
def test_frozen_experts_move_too(text_data: Path) -> None:
    (*_, stock), (first, *_, ours) = (
        _train(2, f"--expert-model-parallel-size 2 --train-iters 5 {more}", text_data, freeze_experts)
        for more in ("", FSSDP)
    )
    assert any("re-sharded" in message for message in first.messages)
    assert relative_difference(ours.losses, stock.losses) <= 1e-6


def freeze_experts() -> None:
    """Have Megatron build models whose routed experts are not trained."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    build = GPTModel.__init__

    def build_frozen(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        for name, parameter in self.named_parameters():
            if ".experts." in name:
                parameter.requires_grad_(False)

    GPTModel.__init__ = build_frozen


def _train(
    ranks: int, arguments: str, data: Path, before: Callable[[], None] | None = None
) -> list[TrainingRun]:
    runs = train_on_all_ranks(ranks, arguments, data, before=before)
    failed = next((run for run in runs if run.exit_code), None)
    assert failed is None, failed.errors[-3000:]
    return runs
