"""Write the table of docs/compatibility.md about Megatron-LM's own training recipes with experts.

usage: MEGATRON_LM_PATH=~/Megatron-LM python scripts/docs/recipes.py        (a test compares them)

The recipes are the functional tests of a checkout.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
# Another checkout may be installed, but the page must be made from this one.
sys.path.insert(0, str(ROOT))

from megatron_fssdp.config.errors import ConfigurationError  # noqa: E402
from megatron_fssdp.config.strategy.strategy_registry import resolve_strategy  # noqa: E402
from megatron_fssdp.megatron_adapter.entry.argument_check import add_strategy_arguments  # noqa: E402
from megatron_fssdp.megatron_adapter.support.limits import EVERY, check_limits  # noqa: E402
from megatron_fssdp.megatron_adapter.support.megatron_settings import MegatronSettings  # noqa: E402
from megatron_fssdp.strategies.registry import build_strategy  # noqa: E402

VARIABLE = "MEGATRON_LM_PATH"
STRATEGY = "fssdp"
FIXED_SLOTS = "slots=2 reshard_interval=0"
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- recipes: begin -->", "<!-- recipes: end -->"

Flags = dict[str, Any]

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
    chosen = []
    for file in sorted(cases.glob("*/*/model_config.yaml")):
        name = file.parent.relative_to(cases).as_posix()
        if "inference" in name or "grpo" in name:
            continue
        flags = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("MODEL_ARGS") or {}
        if "--num-experts" in flags:
            chosen.append(Recipe(name, {flag: value for flag, value in flags.items() if value is not False}))
    return chosen


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


def refusal(recipe: Recipe) -> str | None:
    """Return the features of a recipe that the strategy refuses; ``None`` if it accepts the recipe."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_strategy_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    # Scripts of other packages (ModelOpt, Flextron) have flags of their own.
    args, _ = parser.parse_known_args(words_of(recipe.flags))
    settings = resolve_strategy(STRATEGY, None, recipe.settings.split())
    strategy, asked = build_strategy(STRATEGY, settings), MegatronSettings.of(args)
    try:
        check_limits(STRATEGY, strategy, asked)
    except ConfigurationError as error:  # The first refusal would hide the others.
        reasons = [limit.feature for limit in EVERY if limit.is_met(asked, strategy)]
        return "; ".join(reasons) or str(error)
    return None


def table(all_recipes: Sequence[Recipe]) -> str:
    """Return the part of docs/compatibility.md about the recipes, with its marks: a row for each result.

    Those that are accepted are only counted.
    """
    names_of: dict[str, list[str]] = {}
    for recipe in all_recipes:
        names_of.setdefault(_cell(recipe), []).append(f"`{recipe.name}`")
    lines = (
        f"| {result} | {len(names)}{': ' + ', '.join(names) if result.startswith('refused') else ''} |"
        for result, names in names_of.items()
    )
    return "\n".join([BEGIN, "", "| result | recipes |", "|---|---|", *lines, "", END])


def _cell(recipe: Recipe) -> str:
    if refused := refusal(recipe):
        return f"refused: {refused}"
    given = f" with `{recipe.settings}`" if recipe.settings else ""
    if recipe.obstacle is not None:
        return f"accepted{given}, a CPU cannot run it: {recipe.obstacle}"
    left_out = ", ".join(name for flag, name in LEFT_OUT.items() if flag in recipe.flags)
    return f"trains with equal losses{given}{left_out and f', without {left_out}'}"


def written_table(page: str) -> str:
    """Return the part about the recipes of the text of docs/compatibility.md."""
    return page[page.index(BEGIN) : page.index(END) + len(END)]


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    part = table(recipes(Path(os.environ[VARIABLE])))
    PAGE.write_text(text.replace(written_table(text), part), encoding="utf-8")
