"""The plugin's command-line arguments."""

import argparse
from typing import Any

from megatron_fssdp.config.strategy_registry import STRATEGIES
from megatron_fssdp.config.strategy_selection import resolve_strategy
from megatron_fssdp.config.strategy_settings import StrategySettings


def add_strategy_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--moe-strategy`` and its settings to Megatron's parser."""
    strategies = "; ".join(f"{name} ({entry.summary})" for name, entry in STRATEGIES.items())
    group = parser.add_argument_group(title="MoE strategy (megatron_fssdp)")
    group.add_argument(
        "--moe-strategy",
        default="none",
        metavar="NAME",
        # argparse fills in what follows a per cent sign.
        help=f"How experts are placed: {strategies}.".replace("%", "%%"),
    )
    group.add_argument(
        "--moe-strategy-config",
        metavar="FILE.yaml",
        help="Settings of the strategy, flat keys.",
    )
    group.add_argument(
        "--moe-strategy-set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="One setting of the strategy, e.g. slots=2; repeatable, wins over the file.",
    )
    return parser


def resolve_arguments(args: Any) -> tuple[str, StrategySettings]:
    """The requested strategy and its validated settings.

    Raises:
        ConfigurationError: Unknown strategy or key, wrong type, or settings that exclude each other.
    """
    return resolve_strategy(args.moe_strategy, args.moe_strategy_config, args.moe_strategy_set)
