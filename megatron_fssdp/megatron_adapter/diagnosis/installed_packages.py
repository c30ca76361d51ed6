"""Gathers facts about installed packages: version, folder, and whether they can be imported."""

import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.megatron_adapter.support.broken_packages import broken_package

# Folders of NVIDIA's Apex. The registry has an unrelated package named apex, which has none of them.
_NVIDIA_APEX_FOLDERS = ("multi_tensor_apply", "normalization", "optimizers")
_APEX_CUDA_EXTENSION = "amp_C"


@dataclass(frozen=True)
class InstalledPackage:
    """State of a package on this machine.

    Attributes:
        version: Version from the package itself, or else from pip; ``None`` if neither tells.
        location: Folder of the package; ``None`` if it is not installed.
        error: Error from importing the package; empty if the import worked or the package is not
            installed.
        broken_by: Name of the optional package whose own code raised this error; empty if the package itself
            or an unknown one raised it.
    """

    version: str | None = None
    location: Path | None = None
    error: str = ""
    broken_by: str = ""

    @property
    def works(self) -> bool:
        """Whether it is installed and can be imported."""
        return self.location is not None and not self.error


@dataclass(frozen=True)
class ApexPackage:
    """What is installed under the name ``apex``.

    Attributes:
        version: Version from pip; ``None`` if pip does not know it.
        location: Folder of the package; ``None`` if it is not installed.
        is_nvidias: Whether it is NVIDIA's Apex, which Megatron can use.
        has_cuda_extensions: Whether its CUDA kernels were built.
    """

    version: str | None = None
    location: Path | None = None
    is_nvidias: bool = False
    has_cuda_extensions: bool = False


def look_for(package: str, distribution: str, part: str = "") -> InstalledPackage:
    """Find a package and import it.

    Args:
        package: Name of the package in an import.
        distribution: Name of the package for pip.
        part: Module to import as a test; the package itself if empty.
    """
    location = _location(package)
    if location is None:
        return InstalledPackage()
    error = broken_by = ""
    try:
        importlib.import_module(part or package)
    except Exception as raised:  # A broken installation may raise any error.
        error = one_line(raised)
        broken = broken_package(raised)
        broken_by = broken.name if broken is not None and broken.distribution != distribution else ""
    own = getattr(sys.modules.get(package), "__version__", None)
    return InstalledPackage(str(own) if own else _pip_version(distribution), location, error, broken_by)


def look_for_apex() -> ApexPackage:
    """Find the package ``apex``, and tell by its folders whether it is NVIDIA's. It is not imported."""
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
    """Return an exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _location(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)  # This imports the parents of a dotted name.
    except Exception:  # A parent is missing, or its import raises.
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
