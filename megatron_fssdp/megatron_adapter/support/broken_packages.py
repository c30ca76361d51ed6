"""Recognizes optional packages that are installed, but whose import stops Megatron.

Megatron detects Transformer Engine and Apex by importing them, and expects an ``ImportError`` if they are
missing. Their incomplete installations raise other errors, which end every import of Megatron.
"""

from traceback import walk_tb

TRANSFORMER_ENGINE = "Transformer Engine"
_NAMES = {
    "transformer_engine": TRANSFORMER_ENGINE,
    "transformer_engine_torch": TRANSFORMER_ENGINE,
    "apex": "Apex",
}


def one_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def broken_package(error: BaseException) -> str | None:
    """Return the name of the optional package that caused an error of importing Megatron, if one did.

    A package is the cause if its own code raised the error, or if only an empty folder of it is left, so that
    Megatron finds neither its version nor its metadata.
    """
    raised_in = [str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__)]
    sought_in = getattr(getattr(error, "obj", None), "__name__", "")  # the module without the attribute
    sources = (*raised_in, str(getattr(error, "name", "")), sought_in)
    names = (_NAMES.get(source.partition(".")[0].replace("-", "_")) for source in sources)
    return next(filter(None, names), None)


def broken_package_message(error: BaseException) -> str | None:
    """Return one line about :func:`broken_package`, with the next step."""
    if (name := broken_package(error)) is None:
        return None
    return (
        f"{name}: got an incomplete installation, whose import ends Megatron's import ({one_line(error)}); "
        f"wanted a complete one or none: pip uninstall {name.lower().replace(' ', '-')}, or install it again "
        "by NVIDIA's instructions for the installed torch; then run megatron-fssdp doctor"
    )
