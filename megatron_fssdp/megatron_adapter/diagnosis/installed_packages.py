"""Which packages are installed, from where, and whether they can be imported."""

import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

# Folders of NVIDIA's Apex; the unrelated package of that name on the registry has none of them.
_NVIDIA_APEX_FOLDERS = ("multi_tensor_apply", "normalization", "optimizers")
_APEX_CUDA_EXTENSION = "amp_C"


@dataclass(frozen=True)
class InstalledPackage:
    """What looking for a package gave.

    Attributes:
        version: As the package says itself, else as pip does; ``None`` if neither does.
        location: Its folder; ``None`` if it is not installed.
        error: Why it cannot be imported; empty if it can, or is not there.
    """

    version: str | None = None
    location: Path | None = None
    error: str = ""

    @property
    def works(self) -> bool:
        """Whether it is installed and can be imported."""
        return self.location is not None and not self.error


@dataclass(frozen=True)
class ApexPackage:
    """What is installed under the name ``apex``.

    Attributes:
        version: By pip; ``None`` if it does not know.
        location: Its folder; ``None`` if there is none.
        is_nvidias: Whether it is the one that Megatron can use.
        has_cuda_extensions: Whether its kernels were built.
    """

    version: str | None = None
    location: Path | None = None
    is_nvidias: bool = False
    has_cuda_extensions: bool = False


def look_for(package: str, distribution: str, part: str = "") -> InstalledPackage:
    """Find a package and import it.

    Args:
        package: Its name in an import.
        distribution: Its name for pip.
        part: What of it has to be importable; the package itself by default.
    """
    location = _location(package)
    if location is None:
        return InstalledPackage()
    error = ""
    try:
        importlib.import_module(part or package)
    except Exception as raised:  # a broken installation may raise anything
        error = one_line(raised)
    own = getattr(sys.modules.get(package), "__version__", None)
    return InstalledPackage(str(own) if own else _pip_version(distribution), location, error)


def look_for_apex() -> ApexPackage:
    """Tell NVIDIA's Apex from the registry's package by its folders; nothing of it is imported."""
    location = _location("apex")
    if location is None:
        return ApexPackage()
    return ApexPackage(
        version=_pip_version("apex"),
        location=location,
        is_nvidias=any((location / folder).is_dir() for folder in _NVIDIA_APEX_FOLDERS),
        has_cuda_extensions=importlib.util.find_spec(_APEX_CUDA_EXTENSION) is not None,
    )


def one_line(error: BaseException) -> str:
    """An exception's kind and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _location(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)  # imports the parents of a dotted name
    except Exception:  # a parent is missing, or raises
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    if folders:
        return Path(folders[0])
    return Path(spec.origin).parent if spec.origin else None


def _pip_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
