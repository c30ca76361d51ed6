"""The plugin's arguments on Megatron's command line."""

import argparse
from typing import Any

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.config.strategy.strategy_selection import resolve_strategy
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings


def add_strategy_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--moe-strategy`` and its settings to Megatron's parser, and return the parser."""
    strategies = "; ".join(f"{name} ({entry.summary})" for name, entry in STRATEGIES.items())
    group = parser.add_argument_group(title="MoE strategy (megatron_fssdp)")
    group.add_argument(
        "--moe-strategy",
        default="none",
        metavar="NAME",
        # argparse formats help texts with the % operator, so a per cent sign must be doubled.
        help=f"How experts are placed: {strategies}.".replace("%", "%%"),
    )
    group.add_argument(
        "--moe-strategy-config",
        metavar="FILE.yaml",
        help="YAML file with the settings of the strategy, one flat key per line.",
    )
    group.add_argument(
        "--moe-strategy-set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="One setting of the strategy, for example slots=2. It can be repeated and overrides the file.",
    )
    return parser


def resolve_arguments(args: Any) -> tuple[str, StrategySettings]:
    """Return the requested strategy's name and its validated settings, from Megatron's parsed arguments.

    Raises:
        ConfigurationError: The strategy or a key is unknown, a value has the wrong type, or settings exclude
            each other.
    """
    return resolve_strategy(args.moe_strategy, args.moe_strategy_config, args.moe_strategy_set)
