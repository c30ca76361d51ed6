"""Are the losses of every strategy those of Megatron's own dispatcher on this node? One training per call.

    python benchmarks/gpu_parity.py --case fssdp --precision fp32 --ranks 8 --work DIR --out parity.jsonl
    python benchmarks/gpu_parity.py --case fssdp --ranks 8 --work DIR --sanitize
    python benchmarks/gpu_parity.py --case fssdp --precision bf16 -- --moe-permute-fusion

The training of ``none`` comes first. Each call appends a row to the file, and fails if the losses differ. The
model is small, and on such a model replicas seldom pay. Therefore plans price links as free: every strategy
that compares costs makes replicas or moves experts wherever loads are uneven, so that their code runs. The
ranks run this file, too. ``--sanitize`` compares nothing: torch's sanitizer looks for data races between CUDA
streams in a shorter training, and stops at the first one. Arguments of Megatron need another ``--work``.
"""

import argparse
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from megatron_fssdp.config.run.megatron_arguments import Installation, megatron_arguments
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.strategy.strategy_settings import PROFILE_VARIABLE

BASELINE = "none"

TOLERANCES = {"fp32": 1e-4, "bf16": 1e-2}
"""Largest relative difference of any iteration's loss from the baseline's, by precision.

Strategies sum the same products in another order, and an optimizer step enlarges these differences.
"""

_PLANNED = {"slots": 2, "overlap_degree": 8}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    BASELINE: (BASELINE, {}),
    "ep": ("ep", {}),
    "fssdp": ("fssdp", {}),
    "fssdp-rematerialized": ("fssdp", {**_PLANNED, "rematerialize": True}),
    "fssdp-resharded": ("fssdp", {**_PLANNED, "overlap_degree": 2, "reshard_interval": 2}),
    "fastermoe": ("fastermoe", {}),
    "fastermoe-smart-schedule": ("fastermoe", {"slots": 2, "smart_schedule": True}),
    "prophet": ("prophet", {}),
    "quota": ("quota", {"slots": 2}),
    "smartmoe": ("smartmoe", {"reshard_interval": 2}),
    "flexmoe": ("flexmoe", {"placement_interval": 2, "window": 2}),
    "parm": ("parm", {}),
    "auto": ("auto", {"choice_interval": 4}),
    "none-bf16-gradients": (BASELINE, {}),
    "fssdp-bf16-gradients": ("fssdp", _PLANNED),
    "fssdp-grouped-tensor": ("fssdp", _PLANNED),
    "refused-grouped-tensor": ("fssdp", _PLANNED),
    "fssdp-graphs": ("fssdp", {**_PLANNED, "reshard_interval": 0}),
    "refused-graphs": ("quota", {"slots": 2}),
}
"""Strategies with settings by which they act within few iterations. The baseline comes first."""

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("none-bf16-gradients", "fssdp-bf16-gradients"), ("--grad-reduce-in-bf16",)),
    **dict.fromkeys(
        ("fssdp-graphs", "refused-graphs"),
        ("--cuda-graph-impl=transformer_engine", "--cuda-graph-modules", "moe_router", "moe_preprocess"),
    ),
    "fssdp-grouped-tensor": ("--use-transformer-engine-op-fuser",),
    "refused-grouped-tensor": ("--moe-use-grouped-tensor",),
}
"""Arguments of Megatron for cases that train in bf16 only."""

REFUSED = {"refused-graphs": "with plans after the gate", "refused-grouped-tensor": "moe-use-grouped-tensor"}
"""What the end of a training says that must not begin. Megatron 0.19 does not know the second argument."""

LAUNCHERS = {
    "virtual": ("-m", "devtools.virtual_cuda"),
    "one-card": ("-m", "devtools.one_card"),
}
"""Words that run a program on virtual devices, or several ranks on one GPU; the program follows."""

_NAMES = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "seq_length")
_VIRTUAL_SIZE = dict(zip(_NAMES, (2, 32, 4, 64, 32), strict=True))
_SIZE = dict(zip(_NAMES, (4, 512, 8, 1024, 512), strict=True))
# Megatron compiles these small functions for a GPU. Virtual devices have no compiler.
_VIRTUAL_ARGUMENTS = {
    **dict.fromkeys(("bias_gelu_fusion", "bias_dropout_fusion", "bias_swiglu_fusion"), False),
    "disable_jit_fuser": True,
}
_PREDICTED = re.compile(r"\[fssdp\] memory of a rank: (.+)")


def training_command(
    case: str, precision: str, ranks: int, out: Path, device: str, *, is_short: bool = False
) -> tuple[str, ...]:
    """Return the command that trains one case. Ranks run this file, which makes links free for plans."""
    strategy = CASES[case]
    training = {
        # In 12 iterations, a larger rate lets rounding grow until tokens change their experts.
        **({"train_iters": 6} if device == "virtual" else {"train_iters": 4 if is_short else 12, "lr": 1e-4}),
        "micro_batch_size": 2,
        "global_batch_size": 4 * ranks,
    }
    return small_training(strategy, ranks, out, training, device=device, precision=precision, script=__file__)


def small_training(
    strategy: tuple[str, Mapping[str, Any]],
    ranks: int,
    out: Path,
    training: Mapping[str, Any],
    *,
    device: str = "cuda",
    precision: str = "fp32",
    model: Mapping[str, Any] | None = None,
    script: str = "pretrain_gpt",
) -> tuple[str, ...]:
    """Return the command that trains a small GPT-MoE on all ranks, with expert parallelism over them.

    In fp32 Megatron's local layers are used, because Transformer Engine multiplies fp32 matrices in TF32. In
    bf16 the layers are those of the installation.

    ``strategy`` has name and settings, ``training`` and ``model`` what differs from here. Megatron caches
    data beside the run's folder ``out``. The device is ``cpu``, ``cuda``, ``one-card`` or ``virtual``.
    """
    is_virtual = device == "virtual"
    config = RunConfig.model_validate(
        {
            "model": {
                **(_VIRTUAL_SIZE if is_virtual else _SIZE),
                "num_experts": 2 * ranks if ranks > 3 else 8 * ranks,
                "moe_router_topk": 2,
                "moe_router_load_balancing_type": "none",
                "position_embedding_type": "rope",
                "add_bias_linear": False,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                **(model or {}),
            },
            "data": {"external": True},
            "parallelism": {
                "nproc_per_node": ranks,
                "expert_model_parallel_size": ranks,
                # Plans are topology-aware where a node can have several ranks.
                "declared_nodes": 2 if ranks >= 4 and ranks % 2 == 0 else 1,
            },
            "training": {
                "lr": 1e-3,
                "lr_decay_style": "constant",
                "bf16": precision == "bf16",
                "log_interval": 10,
                "save_checkpoints": False,
                "device": "cpu" if device == "cpu" else "cuda",
                "mock_data": True,
                "tokenizer_type": "NullTokenizer",
                "vocab_size": 1023,
                "split": "100,0,0",
                "data_cache_path": str(out.parent / "data_cache"),
                "num_workers": 0,
                **(_VIRTUAL_ARGUMENTS if is_virtual else {}),
                **training,
            },
            "strategy": {"name": strategy[0], "settings": dict(strategy[1])},
        }
    )
    engine, apex = map(importlib.util.find_spec, ("transformer_engine", "fused_weight_gradient_mlp_cuda"))
    uses_engine = engine is not None and precision == "bf16" and not is_virtual
    installation = Installation(device == "cpu", uses_engine, apex is not None)
    return (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
        *LAUNCHERS.get(device, ()),
        *("-m", "megatron_fssdp", script),
        *megatron_arguments(config, {}, installation, out, resume=False),
    )


_FREE_S_PER_BYTE = 1e-18
_BEFORE_LAYER_S = 1.0  # compute that hides every transfer


def plan_with_free_links() -> None:
    """Replace the measured costs of links after every measurement, equally on all ranks."""
    from megatron_fssdp.megatron_adapter.iterations import iteration_driver
    from megatron_fssdp.planning.cost.cost_model import LinkCost
    from megatron_fssdp.strategies.auto import auto_strategy

    auto_strategy.LEAST_GAIN = 0.0  # Experts take a small part of a layer.
    measure = iteration_driver.profile_layers

    @wraps(measure)
    def profile_layers(layers: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        measure(layers, *args, **kwargs)
        for layer in layers:
            profile = layer.local.context.profile
            # Links between nodes stay slower than links inside a node, as planners expect.
            links = {"intra": LinkCost(0.0, _FREE_S_PER_BYTE), "inter": LinkCost(0.0, 2 * _FREE_S_PER_BYTE)}
            profile = replace(profile, cluster=replace(profile.cluster, **links), non_moe_s=_BEFORE_LAYER_S)
            layer.local.set_profile(profile)

    iteration_driver.profile_layers = profile_layers


def compared(case: str, precision: str, records: Path, baseline: Path) -> dict[str, Any]:
    """Return what a training recorded, its difference from the baseline, and what is wrong with it."""
    metrics = _metrics(records)
    losses, wanted = ([entry["lm_loss"] for entry in entries] for entries in (metrics, _metrics(baseline)))
    peaks = [peak for entry in metrics for peak in entry["rank_peak_bytes"]]
    differences: list[float] = []
    difference, limit, problem = None, TOLERANCES[precision], ""
    if not losses:
        problem = "no losses were recorded"
    elif not all(map(math.isfinite, losses)):
        problem = "a loss is not finite"
    elif len(losses) != len(wanted):
        problem = f"the baseline {BASELINE} has no losses to compare with"
    else:
        differences = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]
        difference = max(differences)
        if difference > limit:
            problem = (
                f"losses differ from those of {BASELINE} by {difference:.1e}, wanted at most {limit:.0e}"
            )
    return {
        "case": case,
        "precision": precision,
        "losses": losses,
        "difference": difference,
        "differences": differences,  # of each iteration
        "problem": problem,
        "num_replicas": max(
            (sum(layer["num_replicas"] for layer in entry["layers"]) for entry in metrics), default=0
        ),
        "num_resharded": sum(entry["resharded_experts"] for entry in metrics),
        "peak_gib": max(peaks, default=0) / 2**30,
    }


def _metrics(records: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError):
        entries = [json.loads(line) for line in (records / "metrics.jsonl").read_text().splitlines()]
        return [
            {**entry, "lm_loss": math.nan if entry["lm_loss"] is None else entry["lm_loss"]}
            for entry in entries
        ]
    return []


def main(words: Sequence[str] | None = None) -> int:
    """Train one case, append its row, and return 1 if the training failed or its losses differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--precision", choices=TOLERANCES, default="fp32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", *LAUNCHERS), default="cuda")
    parser.add_argument("--work", type=Path, default=Path("runs/gpu_parity"), help="folder of all trainings")
    parser.add_argument("--out", type=Path, help="file with one row of JSON for each training")
    parser.add_argument("--sanitize", action="store_true", help="look for data races, and compare nothing")
    parser.add_argument("arguments", nargs="*", help="more arguments of Megatron, after --")
    options = parser.parse_args(words)
    records = options.work / f"{'sanitized' if options.sanitize else options.precision}-{options.case}"
    asked = options.case, options.precision, options.ranks, records, options.device
    command = training_command(*asked, is_short=options.sanitize)
    command += (*ARGUMENTS.get(options.case, ()), *options.arguments)
    # Costs decide early, so that few iterations are enough.
    environment = {**os.environ, "MEGATRON_FSSDP_DEVICE": "cuda", PROFILE_VARIABLE: "2"}
    environment |= {"TORCH_CUDA_SANITIZER": "1"} if options.sanitize else {}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout)
    if options.sanitize:
        return done.returncode
    if options.case in REFUSED:
        return int(not done.returncode or REFUSED[options.case] not in done.stdout)
    alike = f"{BASELINE}-{options.case.partition('-')[2]}"  # the baseline with the same arguments
    baseline = options.work / f"{options.precision}-{alike if alike in CASES else BASELINE}"
    row = compared(options.case, options.precision, records, baseline)
    row["predicted"] = "".join(_PREDICTED.findall(done.stdout)[-1:])
    if options.out is not None:
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    print(row["problem"] or "the losses agree")
    return done.returncode or int(bool(row["problem"]))


if __name__ == "__main__":
    if "RANK" in os.environ:  # this process is a rank
        from megatron_fssdp.pretraining.pretrain_gpt import main as pretrain

        plan_with_free_links()
        pretrain()
    else:
        sys.exit(main())
