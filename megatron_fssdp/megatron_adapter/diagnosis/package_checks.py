"""Checks of Python, torch, Megatron, Transformer Engine and Apex."""

from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict
from megatron_fssdp.megatron_adapter.diagnosis.installed_packages import ApexPackage, InstalledPackage
from megatron_fssdp.megatron_adapter.support.tested_versions import TESTED_VERSIONS, is_tested, pip_install

TRANSFORMER_ENGINE = "Transformer Engine"

_NVIDIAS_INSTRUCTIONS = "by NVIDIA's instructions"


def check_python(version: str, executable: str) -> Finding:
    """Check whether the Python interpreter is new enough.

    Args:
        version: Version of the interpreter.
        executable: Path of the interpreter.
    """
    found = f"{version} ({executable})"
    if is_tested("python", version):
        return Finding("Python", found, Verdict.OK)
    wanted = TESTED_VERSIONS["python"]
    return Finding(
        "Python",
        found,
        Verdict.PROBLEM,
        f"wanted Python {wanted}: install it and create a new virtual environment with it",
    )


def check_torch(torch: InstalledPackage) -> Finding:
    """Check whether torch is installed, can be imported and is new enough.

    Args:
        torch: Installation of torch.
    """
    if problem := _unusable("torch", "torch", torch):
        return problem
    if is_tested("torch", torch.version or ""):
        return Finding("torch", _version(torch), Verdict.OK)
    advice = f"wanted torch {TESTED_VERSIONS['torch']}: {pip_install('torch')}"
    return Finding("torch", _version(torch), Verdict.PROBLEM, advice)


def check_megatron(megatron: InstalledPackage) -> Finding:
    """Check whether Megatron is installed, can be imported and is a tested release.

    An untested release is only a note, because missing seams decide whether it works. If an incomplete
    installation of Transformer Engine ends Megatron's import, Transformer Engine is the problem, and Megatron
    gets only a note.

    Args:
        megatron: Installation of megatron-core.
    """
    if megatron.broken_by:
        found = (
            f"{_version(megatron)} ({megatron.location}) cannot be imported because of {megatron.broken_by}"
        )
        if megatron.broken_by == TRANSFORMER_ENGINE:  # its own finding is the problem, with the advice
            return Finding("Megatron", found, Verdict.NOTE)
        return Finding(
            "Megatron",
            f"{found}: {megatron.error}",
            Verdict.PROBLEM,
            f"wanted a complete installation of {megatron.broken_by} or none: remove it with pip uninstall, "
            f"or build it {_NVIDIAS_INSTRUCTIONS} for the installed torch",
        )
    if problem := _unusable("Megatron", "megatron-core", megatron):
        return problem
    # Megatron appends the commit of the repository around its folder. In a virtual environment inside another
    # repository, this commit is not Megatron's.
    found = f"{_version(megatron).partition('+')[0]} ({megatron.location})"
    if is_tested("megatron-core", megatron.version or ""):
        return Finding("Megatron", found, Verdict.OK)
    return Finding(
        "Megatron",
        found,
        Verdict.NOTE,
        f"the plugin is tested with megatron-core {TESTED_VERSIONS['megatron-core']}; another release may "
        "work if it has all seams: compare the first losses with those of --moe-strategy none, or "
        f"{pip_install('megatron-core')}",
    )


def check_transformer_engine(engine: InstalledPackage, has_gpus: bool) -> Finding:
    """Check whether Transformer Engine can be used. It is optional.

    Args:
        engine: Installation of Transformer Engine.
        has_gpus: Whether this machine has GPUs, which Transformer Engine needs.
    """
    name = TRANSFORMER_ENGINE
    if engine.location is None:
        if not has_gpus:
            return Finding(name, "not installed; only needed on GPUs", Verdict.OK)
        advice = (
            f"install it {_NVIDIAS_INSTRUCTIONS} if you want Megatron's fused layers, TEGroupedMLP or "
            "context parallelism"
        )
        return Finding(name, "not installed; optional", Verdict.NOTE, advice)
    if engine.error:
        return Finding(
            name,
            f"{_version(engine)} ({engine.location}) is installed, but cannot be imported: {engine.error}",
            Verdict.PROBLEM,
            "wanted a complete installation or none: remove all its parts (pip list | grep -i transformer, "
            f"then pip uninstall them), or build it {_NVIDIAS_INSTRUCTIONS} for the installed torch",
        )
    if is_tested("transformer-engine", engine.version or ""):
        return Finding(name, _version(engine), Verdict.OK)
    advice = f"wanted {TESTED_VERSIONS['transformer-engine']}: {pip_install('transformer-engine')}"
    return Finding(name, _version(engine), Verdict.NOTE, advice)


def check_apex(apex: ApexPackage) -> Finding:
    """Check whether the package ``apex`` is NVIDIA's Apex. It is optional.

    Args:
        apex: Package that is installed under the name ``apex``.
    """
    version = apex.version or "of unknown version"
    if apex.location is None:
        return Finding("Apex", "not installed; optional", Verdict.OK)
    if not apex.is_nvidias:
        return Finding(
            "Apex",
            f"{version}, an unrelated package from the registry ({apex.location})",
            Verdict.NOTE,
            "pip uninstall apex: it is not NVIDIA's Apex, and Megatron cannot use it; NVIDIA's Apex is "
            "optional and built from https://github.com/NVIDIA/apex",
        )
    if not apex.has_cuda_extensions:
        advice = f"build it {_NVIDIAS_INSTRUCTIONS} with CUDA extensions, or remove it: pip uninstall apex"
        return Finding("Apex", f"{version}, without its CUDA extensions", Verdict.NOTE, advice)
    return Finding("Apex", version, Verdict.OK)


def _unusable(name: str, distribution: str, package: InstalledPackage) -> Finding | None:
    if package.location is None:
        return Finding(name, "not installed", Verdict.PROBLEM, pip_install(distribution))
    if package.error:
        return Finding(
            name,
            f"{_version(package)} ({package.location}) cannot be imported: {package.error}",
            Verdict.PROBLEM,
            f"fix the cause that the message names, or install it again: {pip_install(distribution)}",
        )
    return None


def _version(package: InstalledPackage) -> str:
    return package.version or "of unknown version"
