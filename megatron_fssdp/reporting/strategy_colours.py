"""One colour for each strategy in all pictures."""

from collections.abc import Sequence

from megatron_fssdp.config.strategy_registry import STRATEGIES


def strategy_colours() -> dict[str, str]:
    """``#RRGGBB`` by name, of the registered strategies that have a colour."""
    return {name: entry.colour for name, entry in STRATEGIES.items() if entry.colour is not None}


def distinct_colours(strategies: Sequence[str]) -> list[str]:
    """A colour for each run: its strategy's, or another one where two runs have the same.

    Args:
        strategies: Of the runs; names that are no strategy's get what is left.
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
