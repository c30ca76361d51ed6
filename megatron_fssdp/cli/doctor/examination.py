"""Runs all checks of a machine for the doctor; those of Python, packages and planning kernels are here."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron_fssdp.cli.doctor.devices import (
    Finding,
    Gpus,
    Verdict,
    check_devices,
    check_folder,
    look_at_gpus,
    note,
    one_line,
    problem,
    shown_variables,
)
from megatron_fssdp.config.run.megatron_options import quiet_output
from megatron_fssdp.config.strategy.strategy_registry import SHIPPED, STRATEGIES
from megatron_fssdp.megatron_adapter.support import capabilities
from megatron_fssdp.megatron_adapter.support.capabilities import TESTED_VERSIONS, pip_install
from megatron_fssdp.planning.compiled_form import REBUILD, kernel_form

if TYPE_CHECKING:
    from megatron_fssdp.config.run.run_config import RunConfig


def examine_machine(
    run: "RunConfig | None" = None, folders: Sequence[tuple[str, Path]] = ()
) -> tuple[Finding, ...]:
    """Check this machine, and a run on it if there is one; this imports torch and Megatron.

    ``folders`` are checkpoint folders, each after the setting or option that names it.
    """
    with quiet_output():
        torch = look_for("torch", "torch")
        engine = look_for("transformer_engine", "transformer-engine", "transformer_engine.pytorch")
        megatron = look_for("megatron.core", "megatron-core")
        gpus = look_at_gpus() if torch.works else Gpus()
        findings = [
            _check_python(),
            check_package("torch", "torch", torch),
            # Missing seams decide whether another release works.
            check_package("Megatron", "megatron-core", megatron, untested="note"),
            check_seams(megatron.works),
            _check_transformer_engine(engine, bool(gpus.models)),
            *check_strategies(),
            check_kernels(),
        ]
        if torch.works:
            findings += check_devices(gpus, run, engine.works)
        else:
            names = ("gloo", "NCCL", "GPUs", *(("ranks",) if run else ()))
            findings += [note(name, "not checked, because torch cannot be imported") for name in names]
    findings.append(shown_variables())
    return (*findings, *(check_folder(folder, setting) for setting, folder in folders))


def torch_report() -> str:
    """Return torch's own report about the machine: versions, driver, GPUs, CPU and packages."""
    try:
        from torch.utils import collect_env

        return str(collect_env.get_pretty_env_info()).strip()
    except Exception as raised:  # torch may be missing or broken, which is a finding of its own
        return f"not available: {one_line(raised)}"


@dataclass(frozen=True)
class InstalledPackage:
    """State of a package on this machine."""

    version: str = "of unknown version"  # from the package itself, or else from pip
    location: str = ""  # its folder; empty if it is not installed
    error: str = ""  # from importing the package

    @property
    def works(self) -> bool:
        """Whether it is installed and can be imported."""
        return bool(self.location) and not self.error

    def __str__(self) -> str:
        return f"{self.version} ({self.location})"


def look_for(package: str, distribution: str, part: str = "") -> InstalledPackage:
    """Find a package by its names in an import and for pip, and import it or a part of it."""
    location = error = ""
    try:
        if spec := importlib.util.find_spec(package):  # This imports the parents of a dotted name.
            location = next(iter(spec.submodule_search_locations or ()), os.path.dirname(spec.origin or ""))
            importlib.import_module(part or package)
    except Exception as raised:  # A broken installation may raise any error.
        error = one_line(raised)
    if not location:
        return InstalledPackage()
    version = getattr(sys.modules.get(package), "__version__", None)
    if version is None:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            version = InstalledPackage.version
    if distribution == "megatron-core":
        # It appends the commit of the repository around its folder, which need not be its own.
        version = str(version).partition("+")[0]
    return InstalledPackage(str(version), location, error)


def is_tested(distribution: str, version: str) -> bool:
    """Whether a version is tested. Suffixes are ignored: ``2.6.0a0+git`` counts as 2.6.0."""
    try:
        return SpecifierSet(TESTED_VERSIONS[distribution]).contains(Version(version).base_version)
    except InvalidVersion:
        return False


def _check_python() -> Finding:
    state, wanted = f"{platform.python_version()} ({sys.executable})", TESTED_VERSIONS["python"]
    if is_tested("python", platform.python_version()):
        return Finding("Python", state)
    advice = f"wanted Python {wanted}: install it and create a new virtual environment with it"
    return problem("Python", state, advice)


def check_package(
    name: str, distribution: str, package: InstalledPackage, untested: Verdict = "problem"
) -> Finding:
    """Return a finding about a package by its name for pip; that on a version out of the range is given."""
    wanted = f"tested with {distribution} {TESTED_VERSIONS[distribution]}: {pip_install(distribution)}"
    if not package.location:
        return problem(name, "not installed", wanted)
    if package.error:
        advice = f"fix the cause that the message names, remove the package, or install it again; {wanted}"
        return problem(name, f"{package} cannot be imported: {package.error}", advice)
    if is_tested(distribution, package.version):
        return Finding(name, str(package))
    return Finding(name, str(package), untested, wanted)


def _check_transformer_engine(engine: InstalledPackage, has_gpus: bool) -> Finding:
    name = "Transformer Engine"
    if engine.location:
        return check_package(name, "transformer-engine", engine, untested="note")
    if not has_gpus:
        return Finding(name, "not installed; only needed on GPUs")
    use = "if you want Megatron's fused layers, TEGroupedMLP or context parallelism"
    return note(name, "not installed; optional", f"install it by NVIDIA's instructions {use}")


def check_seams(has_megatron: bool) -> Finding:
    """Return a finding on what the plugin attaches to in the installed Megatron."""
    check = "Megatron's seams"
    if not has_megatron:
        return note(check, "not checked, because Megatron cannot be imported")
    num = sum(len(names.split()) for names in capabilities.SEAMS.values())
    missing = capabilities.missing_seams(for_training=True)
    state = f"found {num - len(missing)} of {num} functions and classes that the plugin attaches to"
    if not missing:
        return Finding(check, state)
    state += "".join(f"; not {seam} ({one_line(error)})" for seam, error in missing.items())
    return problem(check, state, f"install a tested release: {pip_install('megatron-core')}")


def check_strategies() -> list[Finding]:
    """Return a finding for all installed strategies, and one for each that cannot be used."""
    others = [
        f", {name} from {entry.package}" for name, entry in STRATEGIES.items() if entry.package != SHIPPED
    ]
    findings = [Finding("strategies", f"{len(STRATEGIES) - len(others)} from {SHIPPED}{''.join(others)}")]
    for name, text in STRATEGIES.broken.items():
        state, _, advice = text.rpartition("; ")
        findings.append(note(f"strategy {name}", state, f"{advice}; other strategies work"))
    return findings


def check_kernels() -> Finding:
    """Say in which form planning kernels run; both forms give the same plans."""
    name, form = "planning kernels", kernel_form()
    if form == "compiled":
        return Finding(name, form)
    advice = "planning takes longer; install a C compiler and Python's headers, then install megatron-fssdp"
    return note(name, form, f"{advice} again (in a checkout: {REBUILD})")
