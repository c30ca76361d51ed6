"""Colours of strategies, the same in all plots."""

from collections.abc import Sequence

from megatron_fssdp.config.strategy_registry import STRATEGIES


def strategy_colours() -> dict[str, str]:
    """Return the colours (``#RRGGBB``) of the registered strategies that have one, by name."""
    return {name: entry.colour for name, entry in STRATEGIES.items() if entry.colour is not None}


def distinct_colours(strategies: Sequence[str]) -> list[str]:
    """Return a different colour for each run: that of its strategy, or another one if it is already used.

    Args:
        strategies: Strategy of each run. Unknown names get colours that are not used.
    """
    known = strategy_colours()
    palette = list(known.values())
    reserved = {known[name] for name in strategies if name in known}
    colours: list[str] = []
    for strategy in strategies:
        own = known.get(strategy)
        if own is None or own in colours:
            left = [colour for colour in palette if colour not in {*reserved, *colours}]
            own = left[0] if left else palette[len(colours) % len(palette)]
        colours.append(own)
    return colours
