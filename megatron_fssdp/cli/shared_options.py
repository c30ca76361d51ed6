"""Options and the console that several commands have, and the names that a shell completes.

Help texts do not import the registry of strategies, because that takes long.
"""

from pathlib import Path
from typing import Any

import typer

from megatron_fssdp.config.shipped_files import shipped_runs

SHIPPED_NAMES = "none, ep, fssdp, fastermoe, prophet, quota, smartmoe, flexmoe, parm, auto"
"""Strategies that come with the package."""

SYSTEM_NAMES = "eplb-like, ultraep-like, moonep-like, llep-like"
"""Systems of others, which are only simulated."""

Paths = list[Path] | None
Texts = list[str] | None


def strategy_names(incomplete: str) -> list[tuple[str, str]]:
    """Return all strategies with their summaries, after the names that precede the last comma."""
    from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES

    before = incomplete[: incomplete.rfind(",") + 1]
    return [(before + name, entry.summary) for name, entry in STRATEGIES.items()]


def simulated_names(incomplete: str) -> list[tuple[str, str]]:
    """Return all strategies, and systems of others."""
    before = incomplete[: incomplete.rfind(",") + 1]
    systems = [(before + name, "a system of others") for name in SYSTEM_NAMES.split(", ")]
    return strategy_names(incomplete) + systems


def run_files(words: str, more: str = "", metavar: str = "RUN.yaml") -> Any:
    """Return an option for the YAML files of a run."""
    words = f"YAML of {words} Repeatable for parts of a run.{more}"
    return typer.Option(help=words, metavar=metavar, autocompletion=shipped_runs)


def key_values(words: str, *names: str) -> Any:
    """Return an option for settings of the form KEY=VALUE."""
    return typer.Option(*names, metavar="KEY=VALUE", help=f"{words} Repeatable.")


def plain_console(*, stderr: bool = False) -> Any:
    """Return a console that prints words as they are: without colours of numbers, and on one line."""
    from rich.console import Console

    return Console(markup=False, highlight=False, soft_wrap=True, stderr=stderr)
