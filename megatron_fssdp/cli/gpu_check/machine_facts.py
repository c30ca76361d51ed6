"""Facts about the machine for the page: versions, devices, and chosen environment variables.

The check runs this module in a process of its own, because a broken driver may hang or kill the process that
asks it::

    python -m megatron_fssdp.cli.gpu_check.machine_facts FACTS.json
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

SHOWN_PREFIXES = ("CUDA_", "NCCL_", "TORCH_", "MEGATRON_FSSDP_")
"""Only environment variables that begin so are collected."""

_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL", "AUTH")
_DISTRIBUTIONS = ("megatron-core", "transformer-engine", "apex", "triton", "numpy")


@dataclass(frozen=True)
class MachineFacts:
    """Facts about the machine.

    Attributes:
        time: Date and time of the check, in UTC.
        versions: Version of each package and library, by name.
        devices: Description of each GPU.
        environment: Chosen environment variables.
        num_cores: Number of CPU cores of the machine.
        has_engine: Whether Transformer Engine is installed.
    """

    time: str
    versions: dict[str, str]
    devices: tuple[str, ...] = ()
    environment: dict[str, str] | None = None
    num_cores: int = 0
    has_engine: bool = False

    def json(self) -> str:
        """Return the facts as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "MachineFacts":
        """Make the facts from the text of :meth:`json`.

        Args:
            text: JSON text.
        """
        values = json.loads(text)
        return cls(**{**values, "devices": tuple(values["devices"])})


def gather() -> MachineFacts:
    """Gather the facts about this machine."""
    import torch

    from megatron_fssdp import __version__

    has_gpus = torch.cuda.is_available()
    versions = {
        "megatron-fssdp": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA of torch": str(torch.version.cuda),
        "NCCL of torch": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none",
        "NVIDIA driver": _driver(),
        **{name: _version(name) for name in _DISTRIBUTIONS},
        "system": platform.platform(),
    }
    return MachineFacts(
        time=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        versions=versions,
        devices=tuple(_described(index) for index in range(torch.cuda.device_count())) if has_gpus else (),
        environment=shown_environment(os.environ),
        num_cores=os.cpu_count() or 0,
        has_engine=importlib.util.find_spec("transformer_engine") is not None,
    )


def shown_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that concern CUDA, NCCL, torch and this project, without secrets.

    Args:
        environment: All environment variables.
    """
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(SHOWN_PREFIXES) and not any(word in name.upper() for word in _SECRET_WORDS)
    }


def _described(index: int) -> str:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, capability "
        f"{properties.major}.{properties.minor}"
    )


def _driver() -> str:
    version = Path("/proc/driver/nvidia/version")
    if not version.exists():
        return "none"
    words = version.read_text().split()
    return next((word for word in words if word[:1].isdigit()), "unknown")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(gather().json(), encoding="utf-8")
