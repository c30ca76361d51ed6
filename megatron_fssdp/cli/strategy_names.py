"""The names of strategies for help texts and for the completion of shells."""

SHIPPED_NAMES = "none, ep, fssdp, fastermoe, prophet, quota, smartmoe, flexmoe, parm, auto"
"""Strategies that come with the package. Help texts have them, because the registry takes long to import."""


def complete_strategy(incomplete: str) -> list[str]:
    """Return the names of all installed strategies that begin like a word; commas separate several."""
    from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in STRATEGIES if name.startswith(last)]


def complete_config(incomplete: str) -> list[str]:
    """Return the names of shipped runs that begin like a word."""
    from megatron_fssdp.config.shipped_files import shipped_runs

    return [name for name in shipped_runs() if name.startswith(incomplete)]


def complete_cluster(incomplete: str) -> list[str]:
    """Return the names of known clusters that begin like a word."""
    from megatron_fssdp.config.shipped_files import known_clusters

    return [name for name in known_clusters() if name.startswith(incomplete)]
