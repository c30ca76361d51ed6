"""One colour for each strategy in all pictures."""

from collections.abc import Sequence

# Okabe-Ito, two of Tol's and a brown: told apart by colour-blind readers, and seen on light and dark ground.
STRATEGY_COLOURS = {
    "none": "#7F7F7F",
    "ep": "#0072B2",
    "fssdp": "#D55E00",
    "fastermoe": "#009E73",
    "prophet": "#CC79A7",
    "smartmoe": "#56B4E9",
    "flexmoe": "#E69F00",
    "quota": "#AA4499",
    "parm": "#999933",
    "auto": "#8C564B",
}


def distinct_colours(strategies: Sequence[str]) -> list[str]:
    """A colour for each run: its strategy's, or another one where two runs have the same.

    Args:
        strategies: Of the runs; names that are no strategy's get what is left.
    """
    colours: list[str] = []
    for strategy in strategies:
        own = STRATEGY_COLOURS.get(strategy)
        reserved = {STRATEGY_COLOURS[name] for name in strategies if name in STRATEGY_COLOURS}
        left = [colour for colour in STRATEGY_COLOURS.values() if colour not in {*reserved, *colours}]
        if own is None or own in colours:
            own = left[0] if left else list(STRATEGY_COLOURS.values())[len(colours) % len(STRATEGY_COLOURS)]
        colours.append(own)
    return colours
