"""The strategy of a program that the launcher runs: by Megatron-LM's arguments, or for other hosts."""

import argparse
from collections.abc import Sequence
from importlib.util import find_spec

from megatron_fssdp.config.strategy.strategy_registry import resolve_strategy
from megatron_fssdp.megatron_adapter.entry.attach import asked_by_environment, use
from megatron_fssdp.megatron_adapter.iterations.attachment import Attachment


def turn_on(arguments: Sequence[str]) -> None:
    """Attach the strategy that arguments or the environment ask for, before the program begins.

    If it is one of Megatron-LM's, it parses the same arguments again, with more checks, and attaches anew.
    """
    if find_spec("megatron.training") is not None:
        from megatron_fssdp.megatron_adapter.entry.registration import register

        register(by_launcher=True)
    name, settings = asked_by_environment()
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--moe-strategy", default=name)
    parser.add_argument("--moe-strategy-config")
    parser.add_argument("--moe-strategy-set", action="append", default=settings)
    asked, _ = parser.parse_known_args(list(arguments))
    if asked.moe_strategy not in (None, "none"):
        found = resolve_strategy(asked.moe_strategy, asked.moe_strategy_config, asked.moe_strategy_set)
        use(Attachment(asked.moe_strategy, found))
