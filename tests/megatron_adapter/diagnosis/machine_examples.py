"""Made-up machines that the tests of the doctor examine."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from megatron_fssdp.megatron_adapter.diagnosis import devices, examination, packages
from megatron_fssdp.megatron_adapter.diagnosis.devices import Gpus
from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict
from megatron_fssdp.megatron_adapter.diagnosis.packages import InstalledPackage

OK, NOTE, PROBLEM = Verdict.OK, Verdict.NOTE, Verdict.PROBLEM
HERE = Path("/site-packages/[it]")
H100 = ("NVIDIA H100 80GB HBM3", 80 << 30)
NO_GPUS, EIGHT_GPUS = Gpus(), Gpus((H100,) * 8)


HEALTHY = {
    "torch": InstalledPackage("2.6.0", HERE),
    "megatron": InstalledPackage("0.19.2", HERE),
    "engine": InstalledPackage(),
}


def pose(
    monkeypatch: pytest.MonkeyPatch,
    gpus: Gpus = NO_GPUS,
    num_cores: int = 2,
    python: str = "3.12.1",
    variables: Any = (),
    **packages_: InstalledPackage,
) -> None:
    """Make the doctor find another machine, by default a healthy one with two CPU cores.

    Args:
        monkeypatch: Changes what the doctor finds.
        gpus: The machine's accelerators.
        num_cores: Number of CPU cores.
        python: Version of the interpreter.
        variables: Environment variables; others that the doctor reads are not set.
        packages_: Installed packages, where they differ from those of a healthy machine.
    """
    found = HEALTHY | packages_
    names = {"torch": "torch", "megatron.core": "megatron", "transformer_engine": "engine"}
    monkeypatch.setattr(examination, "look_for", lambda name, *_: found[names[name]])
    monkeypatch.setattr(examination, "look_at_gpus", lambda: gpus)
    monkeypatch.setattr(examination, "quiet_output", contextlib.nullcontext)
    monkeypatch.setattr(examination.platform, "python_version", lambda: python)
    monkeypatch.setattr(devices, "usable_cores", lambda: num_cores)
    monkeypatch.setattr(packages, "check_apex", lambda: Finding("Apex", ""))
    monkeypatch.setattr(packages, "check_kernels", lambda: Finding("planning kernels", ""))
    for name in ("MEGATRON_FSSDP_DEVICE", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in dict(variables).items():
        monkeypatch.setenv(name, value)


def verdicts(findings: Any) -> dict[str, Verdict]:
    return {finding.name: finding.verdict for finding in findings}
