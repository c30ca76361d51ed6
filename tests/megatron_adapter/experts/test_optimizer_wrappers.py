"""Re-shards under Megatron's less common optimizers: losses are those of stock Megatron, also after a resume.

Megatron needs a package for each of these optimizers. A case is skipped where its package is not installed.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ..training_run import relative_difference, rows, train, wrap

# name | package | number of ranks | arguments
OPTIMIZERS = rows(
    """
    several instances, each with parts | einops | 8 | {INSTANCES} {BATCH16}
    several instances, each on one rank | einops | 4 | {INSTANCES}
    muon | emerging_optimizers | 4 | --optimizer muon --muon-momentum 0.9 {NO_BIAS}
    layer-wise muon | emerging_optimizers | 4 | --optimizer muon --muon-momentum 0.9 {NO_BIAS} {DISTRIBUTED}
    """,
    INSTANCES="--use-distributed-optimizer --num-distributed-optimizer-instances 2",
)
FSSDP = "fssdp slots=2 overlap_degree=3 reshard_interval=2"


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_re_shards_keep_the_losses(name: str, text_data: Path, tmp_path: Path) -> None:
    package, num_ranks, arguments = OPTIMIZERS[name]
    if find_spec(package) is None:
        pytest.skip(f"Megatron needs {package} for this optimizer")

    def run(more: str, strategy: str = FSSDP) -> Any:
        return train(int(num_ranks), f"{{EP2}} --bf16 {arguments} {more}", text_data, strategy=strategy)

    stock, ours = run("--train-iters 6", "none"), run("--train-iters 6")
    assert any("re-sharded" in message for message in ours.messages)
    assert relative_difference(ours.losses, stock.losses) <= 2e-3
    # Resuming continues with owners that have moved.
    if name.startswith("several"):
        return  # Stock Megatron cannot resume it without Transformer Engine or Apex either.
    folder = f"{{TORCH_DIST}} --save-interval 4 --save {tmp_path}"
    run(f"--train-iters 4 {folder}")
    resumed = run(f"--train-iters 6 {folder} --load {tmp_path} --override-opt_param-scheduler")
    assert relative_difference(resumed.losses, stock.losses[4:]) <= 2e-3


@pytest.mark.slow
def test_frozen_experts_move_too(text_data: Path) -> None:
    stock, ours = (
        train(2, "{EP2} --train-iters 5", text_data, strategy=strategy, before=freeze_experts)
        for strategy in ("none", FSSDP)
    )
    assert any("re-sharded" in message for message in ours.messages)
    assert relative_difference(ours.losses, stock.losses) <= 1e-6


def freeze_experts() -> None:
    """Have Megatron build models whose routed experts are not trained."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    def build_frozen(build: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        for name, parameter in self.named_parameters():
            if ".experts." in name:
                parameter.requires_grad_(False)

    wrap(GPTModel, "__init__", build_frozen)
