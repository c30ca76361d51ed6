"""Numbers as text, in the unit in which they are at least 1."""

from functools import partial

Units = tuple[tuple[float, str], ...]
"""Size and name of each unit, the largest first."""

TRAFFIC: Units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
"""Bytes that travel, in decimal units, as links are specified."""

MEMORY: Units = ((2.0**30, "GiB"), (2.0**20, "MiB"))
SECONDS: Units = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))
PARAMETERS: Units = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
FLOPS: Units = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1, "FLOP/s"))


def in_units(value: float, units: Units) -> str:
    """Return a value with three digits in the largest unit in which it is at least 1, or the smallest one."""
    size, word = next((unit for unit in units if abs(value) >= unit[0]), units[-1])
    number = value / size
    return f"{number:,.0f} {word}" if abs(number) >= 100 else f"{number:.3g} {word}"


format_bytes = partial(in_units, units=TRAFFIC)
format_memory = partial(in_units, units=MEMORY)
format_seconds = partial(in_units, units=SECONDS)
format_flops = partial(in_units, units=FLOPS)
