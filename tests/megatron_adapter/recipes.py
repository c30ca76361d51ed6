"""Megatron-LM's own training recipes with experts, what a strategy says to them, and small copies of them.

The recipes are the functional tests of a Megatron-LM checkout (``MEGATRON_LM_PATH``). ``python -m
tests.megatron_adapter.recipes`` writes the table of docs/compatibility.md. A small copy trains on a few CPU
ranks. It keeps every flag that is in none of the tables below, so that a new feature of Megatron is trained.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from megatron_fssdp.testing import run_ranks
from tests.support.training_preload import TRAINING_PRELOAD

from .training_run import SMALL, flags

VARIABLE = "MEGATRON_LM_PATH"
STRATEGY = "fssdp"
FIXED_SLOTS = "slots=2 reshard_interval=0"
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BEGIN, END = "<!-- recipes: begin -->", "<!-- recipes: end -->"

Flags = dict[str, Any]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Patterns of flags whose value a small copy sets itself.
SCALED = _words("""
    --*parallel-size --*hidden-size --kv-channels --kv-lora-rank --max-position-embeddings --*batch-size
    --moe-layer-freq --moe-router-*group* --moe-router-topk --moe-shared-expert-intermediate-size
    --num-experts --num-attention-heads --*num-layers --num-layers-per-virtual-* --num-query-groups
    --num-virtual-stages-*
    --pipeline-model-parallel-layout --q-lora-rank --qk-*dim --seq-length --v-head-dim
""")

# Patterns of flags that do not change what is computed: data, length and learning rate of the training,
# checkpoints, logs, and kernels with the same results; and of parts of the features below.
IRRELEVANT = _words("""
    --adam-beta? --apply-wd-* --async-* --attention-backend --auto-detect-* --check-weight-* --ckpt-*
    --cross-entropy-* --cuda-graph-* --data-* --deterministic-mode --disable-gloo-* --dist-ckpt-*
    --distributed-* --enable-experimental --eval-* --exit-* --finetune --first-last-layers-bf16 --fp8-*
    --high-priority-* --load --log-* --logging-level --lr* --make-vocab-* --manual-gc* --merge-file --min-lr
    --moe-hybridep-* --moe-permute-fusion --moe-router-fusion --moe-router-padding-* --no-bias-gelu-fusion
    --no-ckpt-* --no-create-* --no-gradient-* --no-mmap-* --no-rope-fusion --num-layers-at-* --num-workers
    --offload-* --override-* --reuse-grad-* --save* --split --te-rng-tracker --tensorboard-dir --tiktoken-*
    --timing-* --tokenizer-* --train-* --transformer-impl --use-checkpoint-* --use-flash-attn
    --use-mcore-models --use-persistent-* --verify-integrity --vocab-file --wandb-*
""")

# Features that a CPU rank lacks. A small copy trains without them, under stock Megatron too.
LEFT_OUT = {
    "--cuda-graph-impl": "CUDA graphs",
    "--delay-wgrad-compute": "delayed weight gradients",
    "--fine-grained-activation-offloading": "activation offloading",
    "--fp8-format": "fp8",
    "--use-transformer-engine-op-fuser": "the fused grouped MLP",
}

# Features without which a recipe would be another model. A CPU rank cannot train it.
OBSTACLES = {
    "--experimental-attention-variant": "gated delta nets need the package flash-linear-attention and a GPU",
    "--is-hybrid-model": "Mamba layers need the package mamba-ssm and a GPU",
    "--hybrid-layer-pattern": "Mamba layers need the package mamba-ssm and a GPU",
    "--use-megatron-fsdp": "Megatron-FSDP needs a GPU",
}
CONTEXT = "context parallelism needs Transformer Engine's attention"


@dataclass(frozen=True)
class Recipe:
    """A training recipe of Megatron-LM: its folder, and flags with values (``True`` for none)."""

    name: str
    flags: Flags

    @property
    def settings(self) -> str:
        """Settings of the strategy, empty for the defaults; graphs of preprocessing need fixed slots."""
        return FIXED_SLOTS if "moe_preprocess" in str(self.flags.get("--cuda-graph-modules")) else ""

    @property
    def obstacle(self) -> str | None:
        """Why CPU ranks cannot train a small copy; ``None`` if they can."""
        reason = next((reason for flag, reason in OBSTACLES.items() if flag in self.flags), None)
        return reason or (CONTEXT if self.size("--context-parallel-size") > 1 else None)

    def size(self, flag: str, default: int = 1) -> int:
        """Return the value of a flag as a number."""
        return int(self.flags.get(flag, default))


def recipes(checkout: Path) -> list[Recipe]:
    """Read all training recipes with experts. Inference and reinforcement learning are left out."""
    cases = checkout / "tests" / "functional_tests" / "test_cases"
    found = []
    for file in sorted(cases.glob("*/*/model_config.yaml")):
        name = file.parent.relative_to(cases).as_posix()
        if "inference" in name or "grpo" in name:
            continue
        flags = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("MODEL_ARGS") or {}
        if "--num-experts" in flags:
            found.append(Recipe(name, {flag: value for flag, value in flags.items() if value is not False}))
    return found


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as words of a command line, as Megatron-LM's own test script does."""
    words: list[str] = []
    for flag, value in flags.items():
        if flag.startswith("--tokenizer"):  # Some recipes take their type from an environment variable.
            continue
        words.append(flag)
        if value is True:
            continue
        text = str(value)
        words += text[1:-1].split() if text.startswith("[") and text.endswith("]") else [text]
    return words


@dataclass(frozen=True)
class SmallCopy:
    """A recipe, scaled down for CPU ranks: their number, and a command line without data and strategy."""

    num_ranks: int
    arguments: str


def small_copy(recipe: Recipe) -> SmallCopy:
    """Return a recipe with its features and small sizes, on at most eight ranks."""
    dropped = (*SCALED, *IRRELEVANT, *LEFT_OUT)
    kept = (flag for flag in recipe.flags if not any(fnmatch(flag, pattern) for pattern in dropped))
    flags = {flag: recipe.flags[flag] for flag in kept}
    # With this order of ranks, experts and attention must have equal data-parallel sizes.
    most = 4 if "--use-tp-pp-dp-mapping" in recipe.flags else 2
    tensor = min(recipe.size("--tensor-model-parallel-size"), most)
    pipeline = min(recipe.size("--pipeline-model-parallel-size"), 2)
    parts = min(recipe.size("--expert-tensor-parallel-size", tensor), 2)
    # Each instance of the optimizer needs an expert-data-parallel rank of its own.
    per_stage = 4 * min(recipe.size("--num-distributed-optimizer-instances"), 2)
    expert = min(recipe.size("--expert-model-parallel-size"), 4 // parts)
    flags |= {
        "--tensor-model-parallel-size": tensor,
        "--pipeline-model-parallel-size": pipeline,
        "--expert-model-parallel-size": expert,
        "--expert-tensor-parallel-size": parts,
        "--global-batch-size": 2 * (per_stage // tensor) * (2 * pipeline),
    }
    flags |= _layers(recipe, pipeline) | _experts(recipe) | _attention(recipe)
    if tensor == 1:
        flags.pop("--sequence-parallel", None)
    return SmallCopy(
        per_stage * pipeline, f"{SMALL} --moe-ffn-hidden-size 32 {' '.join(words_of(flags))} --train-iters 6"
    )


def _layers(recipe: Recipe, pipeline: int) -> Flags:
    """Return flags for one layer in each model chunk, but at least two layers."""
    later, num_layers = recipe.size("--mtp-num-layers", 0), 2 * pipeline
    layout = recipe.flags.get("--pipeline-model-parallel-layout")
    virtual = recipe.size("--num-virtual-stages-per-pipeline-rank")
    if layout is not None:
        virtual = 1 if layout.count("|") + 1 == recipe.size("--pipeline-model-parallel-size") else 2
    elif "--num-layers-per-virtual-pipeline-stage" in recipe.flags:
        virtual = 2
    chunks = min(virtual, 2) if pipeline > 1 else 1
    flags: Flags = {"--num-layers": num_layers}
    if layout is not None:
        stages = ["t" * (num_layers // (pipeline * chunks))] * (pipeline * chunks)
        flags["--pipeline-model-parallel-layout"] = f"E{'|'.join(stages)}{'m' * later}L"
    elif chunks > 1:
        flags["--num-virtual-stages-per-pipeline-rank"] = chunks
    if later:
        flags["--mtp-num-layers"] = later
    if "0" in str(recipe.flags.get("--moe-layer-freq", "1")):
        flags["--moe-layer-freq"] = f"([0]*1+[1]*{num_layers - 1})"
    return flags


def _experts(recipe: Recipe) -> Flags:
    flags: Flags = {"--num-experts": min(recipe.size("--num-experts"), 16)}
    flags["--moe-router-topk"] = min(recipe.size("--moe-router-topk", 2), 4)
    if "--moe-router-num-groups" in recipe.flags:
        flags |= {"--moe-router-num-groups": 4, "--moe-router-group-topk": 2}
    return flags


def _attention(recipe: Recipe) -> Flags:
    sizes: Flags = {"--num-query-groups": 2, "--moe-shared-expert-intermediate-size": 32}
    if "--multi-latent-attention" in recipe.flags:
        sizes["--q-lora-rank"] = 16
    flags = {flag: size for flag, size in sizes.items() if flag in recipe.flags}
    if "--multi-latent-attention" in recipe.flags:
        flags |= {"--kv-lora-rank": 16, "--qk-head-dim": 8, "--qk-pos-emb-head-dim": 8, "--v-head-dim": 8}
    return flags


def refusals(found: Sequence[Recipe]) -> list[str | None]:
    """Return the features of each recipe that the strategy refuses; ``None`` if it accepts the recipe."""
    (refused,) = run_ranks(_refusals, 1, list(found), preload=TRAINING_PRELOAD)
    return refused


def _refusals(rank: int, world_size: int, found: list[Recipe]) -> list[str | None]:
    return [_refusal(recipe) for recipe in found]


def _refusal(recipe: Recipe) -> str | None:
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    from megatron_fssdp.config.errors import ConfigurationError
    from megatron_fssdp.config.strategy.strategy_registry import resolve_strategy
    from megatron_fssdp.megatron_adapter.entry.argument_check import add_strategy_arguments
    from megatron_fssdp.megatron_adapter.support.limits import EVERY, check_limits
    from megatron_fssdp.megatron_adapter.support.megatron_settings import MegatronSettings
    from megatron_fssdp.strategies.registry import build_strategy

    parser = add_strategy_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    # Scripts of other packages (ModelOpt, Flextron) have flags of their own.
    chosen = flags(f"{STRATEGY} {recipe.settings}").split()
    args, _ = parser.parse_known_args([*words_of(recipe.flags), *chosen])
    name = args.moe_strategy
    settings = resolve_strategy(name, args.moe_strategy_config, args.moe_strategy_set)
    strategy, asked = build_strategy(name, settings), MegatronSettings.of(args)
    try:
        check_limits(name, strategy, asked)
    except ConfigurationError as error:  # The first refusal would hide the others.
        reasons = [limit.what for limit in EVERY if limit.is_met(asked, strategy)]
        return "; ".join(reasons) or str(error)
    return None


def table(found: Sequence[Recipe], refused: Sequence[str | None]) -> str:
    """Return the part of docs/compatibility.md about the recipes, with its marks: a row for each result.

    Those that are accepted are only counted.
    """
    names_of: dict[str, list[str]] = {}
    for recipe, refusal in zip(found, refused, strict=True):
        names_of.setdefault(_cell(recipe, refusal), []).append(f"`{recipe.name}`")
    lines = (
        f"| {result} | {len(names)}{': ' + ', '.join(names) if result.startswith('refused') else ''} |"
        for result, names in names_of.items()
    )
    return "\n".join([BEGIN, "", "| result | recipes |", "|---|---|", *lines, "", END])


def _cell(recipe: Recipe, refusal: str | None) -> str:
    if refusal is not None:
        return f"refused: {refusal}"
    given = f" with `{recipe.settings}`" if recipe.settings else ""
    if recipe.obstacle is not None:
        return f"accepted{given}, a CPU cannot run it: {recipe.obstacle}"
    left_out = ", ".join(name for flag, name in LEFT_OUT.items() if flag in recipe.flags)
    return f"trains with equal losses{given}{left_out and f', without {left_out}'}"


def written_table(page: str) -> str:
    """Return the part about the recipes of the text of docs/compatibility.md."""
    return page[page.index(BEGIN) : page.index(END) + len(END)]


if __name__ == "__main__":
    given, text = recipes(Path(os.environ[VARIABLE])), PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(written_table(text), table(given, refusals(given))), encoding="utf-8")
