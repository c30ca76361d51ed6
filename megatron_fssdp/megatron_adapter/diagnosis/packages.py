"""Facts and findings about Python, torch, Megatron, Transformer Engine, Apex, strategies and kernels."""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.config.strategy.strategy_registry import SHIPPED, STRATEGIES
from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, note, problem
from megatron_fssdp.megatron_adapter.support import capabilities
from megatron_fssdp.megatron_adapter.support.broken_packages import broken_package, one_line
from megatron_fssdp.megatron_adapter.support.tested_versions import TESTED_VERSIONS, is_tested, pip_install
from megatron_fssdp.planning.compiled_form import REBUILD, kernel_form

TRANSFORMER_ENGINE = "Transformer Engine"

_INSTRUCTIONS = "by NVIDIA's instructions"
_BUILD = f"build it {_INSTRUCTIONS}"
# Folders of NVIDIA's Apex. The registry has an unrelated package named apex, which has none of them.
_NVIDIA_APEX_FOLDERS = ("multi_tensor_apply", "normalization", "optimizers")
_APEX_CUDA_EXTENSION = "amp_C"


@dataclass(frozen=True)
class InstalledPackage:
    """State of a package on this machine."""

    version: str = "of unknown version"  # from the package itself, or else from pip
    location: Path | None = None  # its folder; None if it is not installed
    error: str = ""  # from importing the package
    broken_by: str = ""  # name of another, optional package whose own code raised this error

    @property
    def works(self) -> bool:
        """Whether it is installed and can be imported."""
        return self.location is not None and not self.error


def look_for(package: str, distribution: str, part: str = "") -> InstalledPackage:
    """Find a package, with its name in an import and its name for pip, and import it or a part of it."""
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
    return InstalledPackage(str(own or _pip_version(distribution)), location, error, broken_by)


def check_python(version: str, executable: str) -> Finding:
    """Check whether the Python interpreter, with this version and path, is new enough."""
    found, wanted = f"{version} ({executable})", TESTED_VERSIONS["python"]
    advice = f"wanted Python {wanted}: install it and create a new virtual environment with it"
    return Finding("Python", found) if is_tested("python", version) else problem("Python", found, advice)


def check_torch(torch: InstalledPackage) -> Finding:
    """Check whether torch is installed, can be imported and is new enough."""
    if not torch.works:
        return _unusable("torch", "torch", torch)
    if is_tested("torch", torch.version):
        return Finding("torch", torch.version)
    return problem("torch", torch.version, f"wanted torch {TESTED_VERSIONS['torch']}: {pip_install('torch')}")


def check_megatron(megatron: InstalledPackage) -> Finding:
    """Check whether Megatron is installed, can be imported and is a tested release.

    An untested release is only a note, because missing seams decide whether it works.
    """
    name, distribution = "Megatron", "megatron-core"
    if broken_by := megatron.broken_by:
        found = f"{megatron.version} ({megatron.location}) cannot be imported because of {broken_by}"
        if broken_by == TRANSFORMER_ENGINE:  # its own finding is the problem, with the advice
            return note(name, found)
        return problem(name, f"{found}: {megatron.error}", _complete(f"a complete {broken_by}"))
    if not megatron.works:
        return _unusable(name, distribution, megatron)
    # Megatron appends the commit of the repository around its folder. In a virtual environment inside another
    # repository, this commit is not Megatron's.
    found = f"{megatron.version.partition('+')[0]} ({megatron.location})"
    if is_tested(distribution, megatron.version):
        return Finding(name, found)
    advice = (
        f"tested with {distribution} {TESTED_VERSIONS[distribution]}; another release may work if it has all "
        f"seams: compare the first losses with those of --moe-strategy none, or {pip_install(distribution)}"
    )
    return note(name, found, advice)


def check_transformer_engine(engine: InstalledPackage, has_gpus: bool) -> Finding:
    """Check whether Transformer Engine can be used. It is optional, and needs GPUs."""
    name, distribution = TRANSFORMER_ENGINE, "transformer-engine"
    if engine.location is None and not has_gpus:
        return Finding(name, "not installed; only needed on GPUs")
    if engine.location is None:
        use = "if you want Megatron's fused layers, TEGroupedMLP or context parallelism"
        return note(name, "not installed; optional", f"install it {_INSTRUCTIONS} {use}")
    if engine.error:
        found = f"{engine.version} ({engine.location}) is installed, but cannot be imported: {engine.error}"
        return problem(name, found, _complete("a complete installation"))
    if is_tested(distribution, engine.version):
        return Finding(name, engine.version)
    advice = f"wanted {TESTED_VERSIONS[distribution]}: {pip_install(distribution)}"
    return note(name, engine.version, advice)


def check_apex() -> Finding:
    """Tell by its folders whether the installed package ``apex`` is NVIDIA's. It is optional."""
    location, version = _location("apex"), _pip_version("apex")
    if location is None:
        return Finding("Apex", "not installed; optional")
    if not any((location / folder).is_dir() for folder in _NVIDIA_APEX_FOLDERS):
        advice = "pip uninstall apex: it is not NVIDIA's Apex, and Megatron cannot use it"
        return note("Apex", f"{version}, an unrelated package from the registry ({location})", advice)
    if importlib.util.find_spec(_APEX_CUDA_EXTENSION) is None:
        advice = f"{_BUILD} with CUDA extensions, or remove it: pip uninstall apex"
        return note("Apex", f"{version}, without its CUDA extensions", advice)
    return Finding("Apex", version)


def check_seams(has_megatron: bool) -> list[Finding]:
    """Return a finding for the number of seams in the installed Megatron, and one for each missing seam."""
    check = "Megatron's seams"
    if not has_megatron:
        return [note(check, "not checked, because Megatron cannot be imported")]
    missing = []
    for seam in capabilities.SEAMS:
        reason: Exception | None
        try:
            reason = capabilities.absence(seam)
        except Exception as raised:  # A module of Megatron may raise any error when it is imported.
            reason = raised
        if reason is None:
            continue
        name, found = f"seam {seam.path}", f"not in {seam.module} ({one_line(reason)})"
        use = f"here the plugin {seam.purpose}, for {seam.needed_by}"
        if seam.is_optional:
            missing.append(note(name, found, f"{use}; other runs do not need it"))
        else:
            advice = f"no run starts without it: install a tested release: {pip_install('megatron-core')}"
            missing.append(problem(name, found, f"{use}; {advice}"))
    num = len(capabilities.SEAMS)
    found = f"found {num - len(missing)} of {num} functions and classes that the plugin attaches to"
    return [Finding(check, found), *missing]


def check_strategies() -> list[Finding]:
    """Return a finding for all installed strategies, and one for each that cannot be used."""
    packages = [(name, entry.package) for name, entry in STRATEGIES.items()]
    of_others = [f", {name} from {package}" for name, package in packages if package != SHIPPED]
    findings = [Finding("strategies", f"{len(packages) - len(of_others)} from {SHIPPED}{''.join(of_others)}")]
    for broken in STRATEGIES.broken.values():
        found = f"from {broken.package}, cannot be used: {broken.reason}"
        advice = f"update the package, or remove it: pip uninstall {broken.package}; other strategies work"
        findings.append(note(f"strategy {broken.name}", found, advice))
    return findings


def check_kernels() -> Finding:
    """Say in which form planning kernels run; both forms give the same plans."""
    form = kernel_form()
    if form == "compiled":
        return Finding("planning kernels", "compiled")
    advice = (
        "planning takes longer; install a C compiler and Python's headers, then install megatron-fssdp again "
        f"(in a checkout: {REBUILD})"
    )
    return note("planning kernels", form, advice)


def _complete(wanted: str) -> str:
    return (
        f"wanted {wanted} or none: remove all its parts (pip list | grep -i -e transformer -e apex, then pip "
        f"uninstall them), or {_BUILD} for the installed torch"
    )


def _unusable(name: str, distribution: str, package: InstalledPackage) -> Finding:
    if package.location is None:
        return problem(name, "not installed", pip_install(distribution))
    found = f"{package.version} ({package.location}) cannot be imported: {package.error}"
    advice = f"fix the cause that the message names, or install it again: {pip_install(distribution)}"
    return problem(name, found, advice)


def _location(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)  # This imports the parents of a dotted name.
    except Exception:  # A parent is missing, or its import raises.
        return None
    if spec is None:
        return None
    folder = next(iter(spec.submodule_search_locations or ()), os.path.dirname(spec.origin or ""))
    return Path(folder) if folder else None


def _pip_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return InstalledPackage.version
