"""What one check of a node runs on, and where its files are."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

VIRTUAL_RANKS = 4
"""Number of virtual devices: the smallest number that has two nodes of two devices."""

VIRTUAL_LAUNCHER = ("-m", "tests.support.virtual_cuda")
"""Words that run a program on virtual devices; the program follows as ``-m MODULE`` or as a script."""

REPORT_VARIABLE = "MEGATRON_FSSDP_VIRTUAL_CUDA_REPORT"
"""Environment variable with the folder into which each virtual device writes its findings."""


class Precision(StrEnum):
    """Data type of a training's parameters and computation."""

    FP32 = "fp32"
    BF16 = "bf16"


@dataclass(frozen=True)
class CheckPlan:
    """What one check runs on, and where its files are.

    Attributes:
        root: Checkout of the project, with ``benchmarks`` and ``tests``.
        out: Output folder of the check.
        num_ranks: Number of ranks, one for each device.
        is_virtual: Whether CPU processes pose as CUDA devices.
        has_engine: Whether Transformer Engine can be imported.
    """

    root: Path
    out: Path
    num_ranks: int
    is_virtual: bool = False
    has_engine: bool = False

    @property
    def logs(self) -> Path:
        """Folder of the steps' logs."""
        return self.out / "logs"

    @property
    def results(self) -> Path:
        """Folder of the files that steps write for the page and for the zip."""
        return self.out / "results"

    @property
    def findings(self) -> Path:
        """Folder with one folder for each step, into which virtual devices write their findings."""
        return self.results / "virtual_devices"

    @property
    def work(self) -> Path:
        """Folder of the trainings' files, which do not go into the zip."""
        return self.out / "work"
