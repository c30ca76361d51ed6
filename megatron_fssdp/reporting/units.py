"""Numbers as text: bytes of traffic in decimal units, as links are specified, of memory in binary ones."""


def format_bytes(num_bytes: float) -> str:
    """Return bytes that travel as text, in the largest decimal unit that gives a number of at least 1."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB"


def format_memory(num_bytes: float) -> str:
    """Return bytes of memory as text, in MiB or GiB."""
    unit, word = memory_unit(num_bytes)
    return f"{num_bytes / unit:,.3g} {word}" if unit == 2.0**30 else f"{num_bytes / unit:,.0f} {word}"


def memory_unit(num_bytes: float) -> tuple[float, str]:
    """Return the bytes and the name of the unit in which a number of bytes of memory is shown."""
    return (2.0**30, "GiB") if num_bytes >= 2**30 else (2.0**20, "MiB")


def format_seconds(seconds: float) -> str:
    """Return seconds as text with three digits, in s, ms or µs."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:,.3g} {unit}"
    return f"{seconds * 1e6:,.3g} µs"
