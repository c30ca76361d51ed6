"""Names of strategies, for help texts and for shells that complete them.

Help texts do not import the registry, because that takes long.
"""

SHIPPED_NAMES = "none, ep, fssdp, fastermoe, prophet, quota, smartmoe, flexmoe, parm, auto"
"""Strategies that come with the package."""


def strategy_names(incomplete: str) -> list[tuple[str, str]]:
    """Return all strategies with their summaries, after the names that precede the last comma."""
    from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES

    before = incomplete[: incomplete.rfind(",") + 1]
    return [(before + name, entry.summary) for name, entry in STRATEGIES.items()]
