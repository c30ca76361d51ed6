"""Names and colours of strategies and of an iteration's parts, for pages, pictures and the documentation."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES


class TimePart(NamedTuple):
    """A part of an iteration's time.

    Attributes:
        name: Name in pictures.
        colour: Colour in pictures, ``#RRGGBB``.
    """

    name: str
    colour: str


# Compute is blue, tokens are green, and what waits for transfers is red or orange. "passes" is
# undivided in runs that measured no parts of layers. Dispatch and combine together are the all-to-alls.
TIME_PARTS = {
    "passes": TimePart("forward and backward passes", "#4E79A7"),
    "outside": TimePart("passes outside of these layers", "#C9D8EA"),
    "other compute": TimePart("attention, gate, dense", "#A0BCDB"),
    "experts": TimePart("experts", "#2F5A88"),
    "all-to-all": TimePart("tokens to experts and back (all-to-all)", "#76B7B2"),
    "dispatch": TimePart("dispatch: tokens to experts", "#59A89F"),
    "combine": TimePart("combine: results back", "#2F7F78"),
    "waiting for spAG": TimePart("waiting for weights (spAG)", "#D55E00"),
    "waiting for spRS": TimePart("waiting for gradients (spRS)", "#E69F00"),
    "re-sharding": TimePart("experts move to new owners (re-sharding)", "#CC79A7"),
    "gradient sync": TimePart("reduction of dense gradients", "#999933"),
    "host": TimePart("waiting for the host", "#882255"),
    "rest": TimePart("optimizer and everything else", "#A9B4C2"),
}
"""Parts of an iteration's time: those that a run measures, and those of the simulator (keys in ``PARTS``)."""


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
