"""Whole trainings through Megatron's own command line, in forked ranks."""

import contextlib
import io
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fssdp.testing import run_ranks
from megatron_fssdp.testing.parallel_state import MEGATRON_PRELOAD

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py"

TINY_GPT_MOE = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 20
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant --weight-decay 0.01 --clip-grad 1.0
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type none
    --moe-token-dispatcher-type alltoall --disable-bias-linear
    --mock-data --tokenizer-type NullTokenizer --vocab-size 256 --make-vocab-size-divisible-by 1
    --attention-dropout 0 --hidden-dropout 0 --seed 1234 --num-workers 0 --split 100,0,0
    --log-interval 1000 --eval-iters 0 --eval-interval 1000000
    --distributed-backend gloo --use-cpu-initialization --transformer-impl local
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm
    --no-rope-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion
    --disable-jit-fuser
"""


@dataclass(frozen=True)
class TrainingRun:
    """What a training gave on the last rank."""

    losses: list[float]
    grad_norms: list[float]
    output: str


def train(
    world_size: int, arguments: str, *, script: Path = SCRIPT, timeout_s: float = 240, env: dict[str, str] | None = None
) -> TrainingRun:
    """Train the tiny model with more arguments; later ones win."""
    argv = [str(script), *shlex.split(TINY_GPT_MOE), *shlex.split(arguments)]
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "LOCAL_WORLD_SIZE": str(world_size), **(env or {})}
    results = run_ranks(
        _train_on_rank, world_size, argv, timeout_s=timeout_s, env=environment, preload=MEGATRON_PRELOAD
    )
    return results[-1]


def _train_on_rank(rank: int, world_size: int, argv: list[str]) -> TrainingRun:
    from megatron.training import training

    from megatron_fssdp.megatron_adapter.launcher import launch

    losses: list[float] = []
    grad_norms: list[float] = []
    step = training.train_step

    def recording_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if result[0]:
            losses.append(float(next(iter(result[0].values()))))
        grad_norms.append(float(result[5]))
        return result

    training.train_step = recording_step
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        launch(argv)
    return TrainingRun(losses, grad_norms, output.getvalue())
