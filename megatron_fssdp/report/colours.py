"""Names and colours of strategies and of an iteration's parts, for pages, pictures and the documentation."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.systems.system_list import SYSTEMS


class TimePart(NamedTuple):
    """Name of a part of an iteration's time in pictures, and its colour ``#RRGGBB``."""

    name: str
    colour: str


# Compute is blue, tokens are green, and what waits for transfers is red or orange. "passes" is
# undivided in runs that measured no parts of layers.
TIME_PARTS = {
    "passes": TimePart("forward and backward passes", "#4E79A7"),
    "outside": TimePart("passes outside of layers with experts", "#C9D8EA"),
    "other compute": TimePart("attention, gate, dense", "#A0BCDB"),
    "experts": TimePart("experts", "#2F5A88"),
    "all-to-all": TimePart("tokens to experts and back (all-to-all)", "#76B7B2"),
    "waiting for spAG": TimePart("waiting for weights (spAG)", "#D55E00"),
    "waiting for spRS": TimePart("waiting for gradients (spRS)", "#E69F00"),
    "re-sharding": TimePart("experts move to new owners (re-sharding)", "#CC79A7"),
    "dense messages": TimePart("messages of tensor and context parallelism", "#59A14F"),
    "gradient sync": TimePart("reduction of gradients", "#999933"),
    "host": TimePart("planning, and waiting for the host", "#882255"),
    "pipeline bubble": TimePart("waiting for other pipeline stages", "#BAB0AC"),
    "rest": TimePart("optimizer and everything else", "#A9B4C2"),
}
"""Parts of an iteration's time: those that a run measures, and those of the simulator (keys in ``PARTS``)."""


def column_name(part: str) -> str:
    """Return the name of a part's seconds in files, such as ``all_to_all_s``."""
    return f"{part.replace(' ', '_').replace('-', '_')}_s"


def distinct_colours(strategies: Sequence[str]) -> list[str]:
    """Return a different colour for each run: that of its strategy, or another one if it is already used."""
    known = {name: entry.colour for name, entry in STRATEGIES.items() if entry.colour is not None}
    known |= {name: system.colour for name, system in SYSTEMS.items()}
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
