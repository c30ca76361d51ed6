"""Trainings of all strategies, whose losses are compared with those of Megatron's own dispatcher."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fssdp.cli.gpu_check.check_plan import VIRTUAL_LAUNCHER, CheckPlan, Precision
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.megatron_arguments import Installation, megatron_arguments
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.records.metrics import IterationMetrics
from megatron_fssdp.records.metrics_file import METRICS_FILE, read_metrics

BASELINE = "none"

TOLERANCES = {Precision.FP32: 1e-4, Precision.BF16: 1e-2}
"""Largest relative difference of any iteration's loss from the baseline's.

Strategies sum the same products in another order, and an optimizer step enlarges these differences. On CPU
ranks the project's tests allow 1e-5 in fp32 and 2e-3 in bf16.
"""

_SCRIPT = Path(__file__).with_name("parity_training.py")
_VOCAB_SIZE = 1023
# Megatron compiles these small functions for a GPU. Virtual devices have no compiler.
_VIRTUAL_ARGUMENTS = {
    "bias_gelu_fusion": False,
    "bias_dropout_fusion": False,
    "bias_swiglu_fusion": False,
    "disable_jit_fuser": True,
}


@dataclass(frozen=True)
class ParityCase:
    """A strategy with settings.

    Attributes:
        name: Name of the case.
        strategy: Name of the strategy.
        settings: Settings of the strategy. They make it act within few iterations.
    """

    name: str
    strategy: str
    settings: dict[str, Any] = field(default_factory=dict)

    def training_name(self, precision: Precision) -> str:
        """Return the name of the case's training, which is a file name."""
        return f"parity-{self.name}-{precision}"


_PLANNED = {"slots": 2, "overlap_degree": 8}

CASES = (
    ParityCase("none", BASELINE),
    ParityCase("ep", "ep"),
    ParityCase("fssdp", "fssdp"),
    ParityCase("fssdp-rematerialized", "fssdp", {**_PLANNED, "rematerialize": True}),
    ParityCase("fastermoe-smart-schedule", "fastermoe", {"slots": 2, "smart_schedule": True}),
    ParityCase("fssdp-resharded", "fssdp", {**_PLANNED, "reshard_interval": 2}),
    ParityCase("fastermoe", "fastermoe"),
    ParityCase("prophet", "prophet"),
    ParityCase("quota", "quota", {"slots": 2}),
    ParityCase("smartmoe", "smartmoe", {"reshard_interval": 2}),
    ParityCase("flexmoe", "flexmoe", {"placement_interval": 2, "window": 2}),
    ParityCase("parm", "parm"),
    ParityCase("auto", "auto", {"choice_interval": 4}),
)


@dataclass(frozen=True)
class ParityRow:
    """One training compared with the baseline of the same precision.

    Attributes:
        case: Name of the case.
        precision: Data type of the training.
        losses: Loss of each iteration; empty if the training failed.
        first_difference: Relative difference of the first loss, before any optimizer step; ``None`` if it or
            the baseline is missing.
        largest_difference: Largest relative difference of all losses; ``None`` if they or the baseline are
            missing.
        num_replicas: Largest number of replicas of all layers in an iteration.
        transferred_bytes: Bytes of all spAG and spRS, over all devices.
        num_resharded: Number of experts that moved between iterations.
    """

    case: str
    precision: Precision
    losses: tuple[float, ...] = ()
    first_difference: float | None = None
    largest_difference: float | None = None
    num_replicas: int = 0
    transferred_bytes: int = 0
    num_resharded: int = 0

    @property
    def problem(self) -> str:
        """What is wrong with the losses; empty if they are within the tolerance."""
        if not self.losses:
            return "no losses were recorded"
        if not all(math.isfinite(loss) for loss in self.losses):
            return "a loss is not finite"
        if self.largest_difference is None:
            return f"the baseline {BASELINE} has no losses to compare with"
        tolerance = TOLERANCES[self.precision]
        if self.largest_difference <= tolerance:
            return ""
        return (
            f"losses differ from those of {BASELINE} by {self.largest_difference:.1e}, wanted at most "
            f"{tolerance:.0e}"
        )


def run_config(plan: CheckPlan, case: ParityCase, precision: Precision) -> RunConfig:
    """Return the settings of a case's training: a small GPT-MoE with expert parallelism over all ranks.

    Args:
        plan: What the check runs on.
        case: Strategy and settings.
        precision: Data type of the training.
    """
    ranks = plan.num_ranks
    size = (
        {
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "ffn_hidden_size": 64,
            "seq_length": 32,
        }
        if plan.is_virtual
        else {
            "num_layers": 4,
            "hidden_size": 512,
            "num_attention_heads": 8,
            "ffn_hidden_size": 1024,
            "seq_length": 512,
        }
    )
    return RunConfig.model_validate(
        {
            "model": {
                **size,
                "num_experts": 2 * ranks if ranks > 3 else 8 * ranks,
                "moe_router_topk": 2,
                "moe_router_load_balancing_type": "none",
                "position_embedding_type": "rope",
                "add_bias_linear": False,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
            },
            "data": {"external": True},
            "parallelism": {
                "nproc_per_node": ranks,
                "expert_model_parallel_size": ranks,
                "declared_nodes": _nodes(ranks),
            },
            "training": {
                "train_iters": 6 if plan.is_virtual else 12,
                "micro_batch_size": 2,
                "global_batch_size": 4 * ranks,  # two micro-batches for each rank
                "lr": 1e-3,
                "lr_decay_style": "constant",
                "adam_beta2": 0.95,
                "bf16": precision is Precision.BF16,
                "log_interval": 10,
                "save_checkpoints": False,
                "device": "cuda",
                "mock_data": True,
                "tokenizer_type": "NullTokenizer",
                "vocab_size": _VOCAB_SIZE,
                "split": "100,0,0",
                "data_cache_path": str(plan.work / "data_cache"),
                "num_workers": 0,
                **(_VIRTUAL_ARGUMENTS if plan.is_virtual else {}),
            },
            "strategy": {"name": case.strategy, "settings": case.settings},
        }
    )


def training_command(plan: CheckPlan, case: ParityCase, precision: Precision, python: str) -> tuple[str, ...]:
    """Return the command that starts a case's training on all ranks.

    In fp32 Megatron's local layers are used, because Transformer Engine multiplies fp32 matrices in TF32. In
    bf16 the layers are those of the installation.

    Args:
        plan: What the check runs on.
        case: Strategy and settings.
        precision: Data type of the training.
        python: Python interpreter.
    """
    has_engine = plan.has_engine and precision is Precision.BF16 and not plan.is_virtual
    arguments = megatron_arguments(
        run_config(plan, case, precision),
        None,
        Installation(on_cpu=False, has_transformer_engine=has_engine),
        records_of(plan, case, precision),
        resume=False,
    )
    return (
        *(python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={plan.num_ranks}"),
        *(VIRTUAL_LAUNCHER if plan.is_virtual else ()),
        *("-m", "megatron_fssdp", str(_SCRIPT), *arguments),
    )


def records_of(plan: CheckPlan, case: ParityCase, precision: Precision) -> Path:
    """Return the folder of a training's records.

    Args:
        plan: What the check runs on.
        case: Strategy and settings.
        precision: Data type of the training.
    """
    return plan.work / case.training_name(precision)


def compared(plan: CheckPlan, case: ParityCase, precision: Precision) -> ParityRow:
    """Compare the recorded losses of a training with those of the baseline.

    Args:
        plan: What the check runs on.
        case: Strategy and settings.
        precision: Data type of the training.
    """
    metrics = _metrics(plan, case, precision)
    losses = tuple(entry.lm_loss for entry in metrics)
    wanted = [entry.lm_loss for entry in _metrics(plan, CASES[0], precision)]
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=False)]
    is_comparable = bool(losses) and len(losses) == len(wanted)
    layers = [layer for entry in metrics for layer in entry.layers]
    return ParityRow(
        case.name,
        precision,
        losses,
        first_difference=differences[0] if is_comparable else None,
        largest_difference=max(differences) if is_comparable else None,
        num_replicas=max((sum(layer.num_replicas for layer in entry.layers) for entry in metrics), default=0),
        transferred_bytes=sum(layer.spag_bytes + layer.sprs_bytes for layer in layers),
        num_resharded=sum(entry.resharded_experts for entry in metrics),
    )


def _metrics(plan: CheckPlan, case: ParityCase, precision: Precision) -> Sequence[IterationMetrics]:
    folder = records_of(plan, case, precision)
    if not (folder / METRICS_FILE).exists():
        return ()
    try:
        return read_metrics(folder)
    except ConfigurationError:
        return ()


def _nodes(num_ranks: int) -> int:
    """Number of declared nodes: two if there are several ranks for each, so that plans are topology-aware."""
    return 2 if num_ranks >= 4 and num_ranks % 2 == 0 else 1
