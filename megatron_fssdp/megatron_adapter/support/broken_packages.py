"""Recognizes optional packages that are installed, but whose import stops Megatron.

Megatron detects Transformer Engine and Apex by importing them, and expects an ``ImportError`` if they are
missing. Their incomplete installations raise other errors (Transformer Engine: ``RuntimeError`` without its
torch extension, ``FileNotFoundError`` without its core library). Such an error ends every import of Megatron.
"""

from dataclasses import dataclass
from types import TracebackType

_NAMES = {
    "transformer_engine": "Transformer Engine",
    "transformer_engine_torch": "Transformer Engine",
    "apex": "Apex",
}


@dataclass(frozen=True)
class BrokenPackage:
    """An optional package whose import ended an import of Megatron.

    Attributes:
        name: Name of the package in prose, for example ``Transformer Engine``.
        distribution: Name of the package for pip.
        error: Type and first line of the error that the import raised.
    """

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


def broken_package(error: BaseException) -> BrokenPackage | None:
    """Return the optional package that caused an error, or ``None`` if no such package did.

    A package is the cause if its own code raised the error, or if only an empty folder of it is left, so that
    Megatron finds neither its version nor its metadata.

    Args:
        error: Error that an import of Megatron raised, with its traceback.
    """
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    sought_in = getattr(error, "obj", None)  # the module without the attribute
    sources = [
        *_packages(error.__traceback__),
        getattr(error, "name", None),
        getattr(sought_in, "__name__", None),
    ]
    for package in (str(source).replace("-", "_") for source in sources):
        if package in _NAMES:
            name = _NAMES[package]
            return BrokenPackage(name, name.lower().replace(" ", "-"), text)
    return None


def _packages(traceback: TracebackType | None) -> list[str]:
    """Return the top-level package of each frame, beginning with the outermost frame."""
    packages = []
    while traceback is not None:
        packages.append(str(traceback.tb_frame.f_globals.get("__name__", "")).partition(".")[0])
        traceback = traceback.tb_next
    return packages
