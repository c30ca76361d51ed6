"""Options that several commands have, and the names that a shell completes for them.

Help texts do not import the registry of strategies, because that takes long.
"""

from pathlib import Path
from typing import Any

import typer

from megatron_fssdp.config.shipped_files import shipped_runs

SHIPPED_NAMES = "none, ep, fssdp, fastermoe, prophet, quota, smartmoe, flexmoe, parm, auto"
"""Strategies that come with the package."""

Paths = list[Path] | None
Texts = list[str] | None


def strategy_names(incomplete: str) -> list[tuple[str, str]]:
    """Return all strategies with their summaries, after the names that precede the last comma."""
    from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES

    before = incomplete[: incomplete.rfind(",") + 1]
    return [(before + name, entry.summary) for name, entry in STRATEGIES.items()]


def run_files(words: str, more: str = "", metavar: str = "RUN.yaml") -> Any:
    """Return an option for the YAML files of a run."""
    words = f"YAML of {words} Repeatable for parts of a run.{more}"
    return typer.Option(help=words, metavar=metavar, autocompletion=shipped_runs)


def key_values(words: str, *names: str) -> Any:
    """Return an option for settings of the form KEY=VALUE."""
    return typer.Option(*names, metavar="KEY=VALUE", help=f"{words} Repeatable.")


def strategy_list(verb: str, more: str = "") -> Any:
    """Return an option for strategies to rank or simulate."""
    words = f"Strategies to {verb}, separated by commas, of {SHIPPED_NAMES}.{more}"
    return typer.Option(help=words, autocompletion=strategy_names)
