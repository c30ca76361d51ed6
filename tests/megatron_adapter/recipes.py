"""Megatron-LM's own training recipes with experts, and what a strategy says to them.

The recipes are the functional tests of a Megatron-LM checkout. Only names, flags and verdicts are written
down here; the texts stay in the checkout. ``python -m tests.megatron_adapter.recipes`` writes the table of
docs/compatibility.md. It needs ``MEGATRON_LM_PATH``.

Every flag of a recipe is in exactly one of the tables below. A flag that is in none of them is an error, so a
new release of Megatron cannot bring a feature that is overlooked.
"""

import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_fssdp.testing import run_ranks
from megatron_fssdp.testing.parallel_state import MEGATRON_PRELOAD

from .training_run import flags

VARIABLE = "MEGATRON_LM_PATH"
STRATEGY = "fssdp"
FIXED_SLOTS = "slots=2 reshard_interval=0"
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BEGIN, END = "<!-- recipes: begin -->", "<!-- recipes: end -->"

Flags = dict[str, Any]


def _flags(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Flags that a small copy keeps unchanged.
KEPT = _flags(
    """
    --add-qkv-bias --apply-query-key-layer-scaling --attention-dropout --attention-softmax-in-fp32 --bf16
    --calculate-per-token-loss --clip-grad --ddp-average-in-collective --ddp-num-buckets
    --ddp-pad-buckets-for-high-nccl-busbw --disable-bias-linear --fp16 --grad-reduce-in-bf16
    --group-query-attention --hidden-dropout --init-method-std --moe-aux-loss-coeff
    --moe-flex-dispatcher-backend --moe-grouped-gemm --moe-router-bias-update-rate --moe-router-dtype
    --moe-router-enable-expert-bias --moe-router-load-balancing-type --moe-router-pre-softmax
    --moe-router-score-function --moe-router-topk-scaling-factor --moe-shared-expert-gate
    --moe-shared-expert-overlap --moe-token-dispatcher-type --mscale --mscale-all-dim
    --mtp-loss-scaling-factor --multi-latent-attention --muon-extra-scale-factor --muon-momentum
    --muon-scale-mode --no-check-for-nan-in-loss-and-grad --no-use-layer-wise-param-layout --norm-epsilon
    --normalization --num-distributed-optimizer-instances --optimizer --overlap-grad-reduce
    --overlap-moe-expert-parallel-comm --overlap-param-gather --position-embedding-type --qk-layernorm
    --recompute-granularity --recompute-modules --rotary-base --rotary-percent --rotary-scaling-factor
    --sequence-parallel --squared-relu --swiglu --untie-embeddings-and-output-weights
    --use-distributed-optimizer --use-tp-pp-dp-mapping --weight-decay
    """
)

# Flags whose value a small copy changes.
SCALED = _flags(
    """
    --context-parallel-size --expert-model-parallel-size --expert-tensor-parallel-size --ffn-hidden-size
    --global-batch-size --hidden-size --kv-channels --kv-lora-rank --max-position-embeddings
    --micro-batch-size --moe-ffn-hidden-size --moe-layer-freq --moe-router-group-topk
    --moe-router-num-groups --moe-router-topk --moe-shared-expert-intermediate-size --mtp-num-layers
    --num-attention-heads --num-experts --num-layers --num-layers-per-virtual-pipeline-stage
    --num-query-groups --num-virtual-stages-per-pipeline-rank --pipeline-model-parallel-layout
    --pipeline-model-parallel-size --q-lora-rank --qk-head-dim --qk-pos-emb-head-dim --seq-length
    --tensor-model-parallel-size --v-head-dim
    """
)

# Features that a CPU rank lacks. A small copy trains without them, under stock Megatron too.
LEFT_OUT = {
    "--cuda-graph-impl": "CUDA graphs",
    "--delay-wgrad-compute": "delayed weight gradients",
    "--fine-grained-activation-offloading": "activation offloading",
    "--fp8-format": "fp8",
    "--use-transformer-engine-op-fuser": "the fused grouped MLP",
}

# Parts of the features above, and flags that do not change what is computed: data, length and learning rate
# of the training, checkpoints, logs, and kernels with the same results.
IRRELEVANT = _flags(
    """
    --adam-beta1 --adam-beta2 --apply-wd-to-qk-layernorm --async-ckpt-use-cpu-shm --async-save
    --async-strategy --attention-backend --auto-detect-ckpt-format
    --check-weight-hash-across-dp-replicas-interval --ckpt-assume-constant-structure --ckpt-format
    --ckpt-fully-parallel-load --ckpt-fully-parallel-save --cross-entropy-fusion-impl
    --cross-entropy-loss-fusion --cuda-graph-modules --cuda-graph-warmup-steps --data-cache-path --data-path
    --deterministic-mode --disable-gloo-process-groups --dist-ckpt-optim-fully-reshardable
    --dist-ckpt-strictness --distributed-backend --distributed-timeout-minutes --enable-experimental
    --eval-interval --eval-iters --exit-duration-in-mins --exit-interval --finetune
    --first-last-layers-bf16 --fp8-param-gather --fp8-recipe --high-priority-stream-groups --load
    --log-energy --log-interval
    --log-memory-interval --log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm
    --log-progress --log-throughput --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard
    --logging-level --lr --lr-decay-iters --lr-decay-samples --lr-decay-style --lr-warmup-fraction
    --lr-warmup-init --lr-warmup-samples --lr-wsd-decay-samples --lr-wsd-decay-style
    --make-vocab-size-divisible-by --manual-gc --manual-gc-interval --merge-file --min-lr
    --moe-hybridep-num-sms --moe-permute-fusion --moe-router-fusion
    --moe-router-padding-for-quantization --no-bias-gelu-fusion --no-ckpt-fully-parallel-save
    --no-create-attention-mask-in-dataloader --no-gradient-accumulation-fusion --no-mmap-bin-files
    --no-rope-fusion --num-layers-at-end-in-bf16 --num-layers-at-start-in-bf16 --num-workers
    --offload-modules --override-opt_param-scheduler --reuse-grad-buf-for-mxfp8-param-ag --save
    --save-interval --save-retain-interval --split --te-rng-tracker --tensorboard-dir --tiktoken-pattern
    --timing-log-level --timing-log-option --tokenizer-model --tokenizer-type --train-iters --train-samples
    --transformer-impl --use-checkpoint-opt_param-scheduler --use-flash-attn --use-mcore-models
    --use-persistent-ckpt-worker --verify-integrity --vocab-file --wandb-entity --wandb-exp-name
    --wandb-project --wandb-save-dir
    """
)

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
    def is_release(self) -> bool:
        """Whether Megatron-LM checks releases with it, at full size."""
        return "release" in self.name

    def size(self, flag: str, default: int = 1) -> int:
        """Return the value of a flag as a number."""
        return int(self.flags.get(flag, default))


@dataclass(frozen=True)
class Verdict:
    """What a strategy says to a recipe."""

    refusal: str | None  # names of all refused features
    obstacle: str | None  # why CPU ranks cannot train a small copy
    left_out: tuple[str, ...]  # features that the small copy leaves out

    @property
    def trains(self) -> bool:
        """Whether the test trains a small copy of the recipe."""
        return self.refusal is None and self.obstacle is None


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


def unknown_flags(recipe: Recipe) -> list[str]:
    """Return the flags of a recipe that no table of this file has."""
    if obstacle(recipe) is not None:
        return []
    known = KEPT | SCALED | IRRELEVANT | LEFT_OUT.keys()
    return sorted(recipe.flags.keys() - known)


def obstacle(recipe: Recipe) -> str | None:
    """Return why CPU ranks cannot train a small copy of a recipe; ``None`` if they can."""
    reason = next((reason for flag, reason in OBSTACLES.items() if flag in recipe.flags), None)
    return reason or (CONTEXT if recipe.size("--context-parallel-size") > 1 else None)


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as words of a command line, as Megatron-LM's own test script does.

    Tokenizers are left out: some recipes take their type from an environment variable.
    """
    words: list[str] = []
    for flag, value in flags.items():
        if flag.startswith("--tokenizer"):
            continue
        words.append(flag)
        if value is True:
            continue
        text = str(value)
        words += text[1:-1].split() if text.startswith("[") and text.endswith("]") else [text]
    return words


def verdicts(found: Sequence[Recipe]) -> list[Verdict]:
    """Parse recipes with Megatron's parser and ask the strategy about their arguments, on a forked rank."""
    (refusals,) = run_ranks(_refusals, 1, list(found), preload=MEGATRON_PRELOAD, timeout_s=300)
    left_out = [tuple(name for flag, name in LEFT_OUT.items() if flag in recipe.flags) for recipe in found]
    return list(map(Verdict, refusals, map(obstacle, found), left_out))


def _refusals(rank: int, world_size: int, found: list[Recipe]) -> list[str | None]:
    return [_refusal(recipe) for recipe in found]


def _refusal(recipe: Recipe) -> str | None:
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    from megatron_fssdp.config.errors import ConfigurationError
    from megatron_fssdp.config.strategy.strategy_selection import resolve_strategy
    from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_arguments import fit_checkpoint_arguments
    from megatron_fssdp.megatron_adapter.entry.argument_check import add_strategy_arguments
    from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
    from megatron_fssdp.megatron_adapter.support.supported_features import REFUSALS

    parser = add_strategy_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    # Scripts of other packages (ModelOpt, Flextron) have flags of their own.
    chosen = flags(f"{STRATEGY} {recipe.settings}").split()
    args, _ = parser.parse_known_args([*words_of(recipe.flags), *chosen])
    name, settings = resolve_strategy(args.moe_strategy, args.moe_strategy_config, args.moe_strategy_set)
    session = StrategySession(name, settings)
    # The first refusal would hide the others.
    reasons = [what for what, is_refused, _ in REFUSALS if is_refused(lambda name: getattr(args, name, None))]
    try:
        session.check_model(args)
        if session.strategy.moves_owners:
            fit_checkpoint_arguments(name, args)
    except ConfigurationError as error:
        return "; ".join(reasons) or str(error)
    assert not reasons, reasons
    return None


def table(found: Sequence[Recipe], given: Sequence[Verdict]) -> str:
    """Return the part of docs/compatibility.md about the recipes, numbers first."""
    accepted = [verdict for verdict in given if verdict.refusal is None]
    trained = [verdict for verdict in accepted if verdict.trains]
    whole = [verdict for verdict in trained if not verdict.left_out]
    releases = [v for recipe, v in zip(found, given, strict=True) if recipe.is_release]
    named = [verdict.refusal.split("; ") for verdict in given if verdict.refusal is not None]
    refused = Counter(what for names in named for what in names)
    reasons = "; ".join(f"{what} ({number})" for what, number in refused.most_common())
    accepted_releases = sum(verdict.refusal is None for verdict in releases)
    left_out = (
        f" {len(trained) - len(whole)} of these copies leave out features that a CPU lacks."
        if trained != whole
        else ""
    )
    numbers = (
        f"`--moe-strategy {STRATEGY}` accepts **{len(accepted)} of the {len(found)}** training recipes with "
        f"experts of Megatron-LM `core_v0.19.0`, {accepted_releases} of its {len(releases)} release recipes "
        f"among them. Small copies of {len(trained)} of them train on CPU ranks with the losses of stock "
        f"Megatron, under `fssdp` and under `auto`.{left_out} A CPU cannot train the other "
        f"{len(accepted) - len(trained)}. What stands in the way of the refused recipes: "
        f"{reasons or 'nothing'}."
    )
    rows = zip(found, given, strict=True)
    lines = [f"| `{recipe.name}` | {_cell(recipe, verdict)} |" for recipe, verdict in rows]
    text = textwrap.fill(numbers, 120, break_on_hyphens=False)
    return "\n".join([BEGIN, "", text, "", "| recipe | result |", "|---|---|", *lines, "", END])


def _cell(recipe: Recipe, verdict: Verdict) -> str:
    if verdict.refusal is not None:
        return f"refused: {verdict.refusal}"
    accepted = f"accepted with `{recipe.settings}`" if recipe.settings else "accepted"
    if verdict.obstacle is not None:
        return f"{accepted}, a CPU cannot run it: {verdict.obstacle}"
    given = f" with `{recipe.settings}`" if recipe.settings else ""
    without = f", without {', '.join(verdict.left_out)}" if verdict.left_out else ""
    return f"trains with equal losses{given}{without}"


def written_table(page: str) -> str:
    """Return the part about the recipes of the text of docs/compatibility.md."""
    return page[page.index(BEGIN) : page.index(END) + len(END)]


def checkout() -> Path | None:
    """Return the Megatron-LM checkout that the environment names; ``None`` if it names none."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path else None


def main() -> None:
    """Write the table into docs/compatibility.md."""
    root = checkout()
    if root is None:
        sys.exit(f"{VARIABLE}: got nothing, wanted the folder of a Megatron-LM checkout; set it")
    found = recipes(root)
    page = PAGE.read_text(encoding="utf-8")
    text = table(found, verdicts(found))
    PAGE.write_text(page.replace(written_table(page), text), encoding="utf-8")
    print(re.sub(r"\n\n\|.*", "", text.removeprefix(BEGIN).strip(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
