"""Recognizes optional packages that are installed, but whose import stops Megatron.

Megatron detects Transformer Engine and Apex by importing them, and expects an ``ImportError`` if they are
missing. Their incomplete installations raise other errors, which end every import of Megatron.
"""

from dataclasses import dataclass
from traceback import walk_tb

_NAMES = {
    "transformer_engine": "Transformer Engine",
    "transformer_engine_torch": "Transformer Engine",
    "apex": "Apex",
}


@dataclass(frozen=True)
class BrokenPackage:
    """An optional package whose import ended an import of Megatron: its name, for pip too, and the error."""

    name: str
    distribution: str
    error: str

    def message(self) -> str:
        """Return one line: what was found, what is wanted, and the next step."""
        return (
            f"{self.name}: got an incomplete installation, whose import ends Megatron's import "
            f"({self.error}); wanted a complete one or none: pip uninstall {self.distribution}, or install "
            "it again by NVIDIA's instructions for the installed torch; then run megatron-fssdp doctor"
        )


def one_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def broken_package(error: BaseException) -> BrokenPackage | None:
    """Return the optional package that caused an error of importing Megatron; ``None`` if no such one did.

    A package is the cause if its own code raised the error, or if only an empty folder of it is left, so that
    Megatron finds neither its version nor its metadata.
    """
    raised_in = [str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__)]
    sought_in = getattr(getattr(error, "obj", None), "__name__", "")  # the module without the attribute
    for source in (*raised_in, str(getattr(error, "name", "")), sought_in):
        if name := _NAMES.get(source.partition(".")[0].replace("-", "_")):
            return BrokenPackage(name, name.lower().replace(" ", "-"), one_line(error))
    return None
