"""Python, torch, Megatron and its two optional companions."""

from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict
from megatron_fssdp.megatron_adapter.diagnosis.installed_packages import ApexPackage, InstalledPackage
from megatron_fssdp.megatron_adapter.support.tested_versions import TESTED_VERSIONS, is_tested, pip_install

_NVIDIAS_INSTRUCTIONS = "by NVIDIA's own instructions"


def check_python(version: str, executable: str) -> Finding:
    """Whether the interpreter is new enough.

    Args:
        version: Of the interpreter.
        executable: Its path.
    """
    found = f"{version} ({executable})"
    if is_tested("python", version):
        return Finding("Python", found, Verdict.OK)
    wanted = TESTED_VERSIONS["python"]
    return Finding(
        "Python", found, Verdict.PROBLEM, f"wanted Python {wanted}: install one and make a new environment"
    )


def check_torch(torch: InstalledPackage) -> Finding:
    """Whether torch is there, works and is new enough."""
    if problem := _unusable("torch", "torch", torch):
        return problem
    if is_tested("torch", torch.version or ""):
        return Finding("torch", _version(torch), Verdict.OK)
    advice = f"wanted torch {TESTED_VERSIONS['torch']}: {pip_install('torch')}"
    return Finding("torch", _version(torch), Verdict.PROBLEM, advice)


def check_megatron(megatron: InstalledPackage) -> Finding:
    """Whether Megatron is there and of a tested release; what it lacks decides, not its version."""
    if problem := _unusable("Megatron", "megatron-core", megatron):
        return problem
    # Megatron adds the commit of whatever repository it lies in, an environment's surroundings too.
    found = f"{_version(megatron).partition('+')[0]} ({megatron.location})"
    if is_tested("megatron-core", megatron.version or ""):
        return Finding("Megatron", found, Verdict.OK)
    return Finding(
        "Megatron",
        found,
        Verdict.NOTE,
        f"tested with megatron-core {TESTED_VERSIONS['megatron-core']}; another one may work where all seams "
        f"are there: compare the first losses with those of --moe-strategy none, or "
        f"{pip_install('megatron-core')}",
    )


def check_transformer_engine(engine: InstalledPackage, has_gpus: bool) -> Finding:
    """Whether Transformer Engine can be used; it is optional.

    Args:
        engine: What was found.
        has_gpus: Whether there is anything that it could run on.
    """
    name = "Transformer Engine"
    if engine.location is None:
        if not has_gpus:
            return Finding(name, "not installed; of use on GPUs only", Verdict.OK)
        advice = (
            f"install it {_NVIDIAS_INSTRUCTIONS} for Megatron's fused layers, TEGroupedMLP and context "
            "parallelism"
        )
        return Finding(name, "not installed; optional", Verdict.NOTE, advice)
    if engine.error:
        return Finding(
            name,
            f"{_version(engine)} cannot be imported: {engine.error}",
            Verdict.PROBLEM,
            f"build it {_NVIDIAS_INSTRUCTIONS} for the installed torch, or pip uninstall transformer-engine",
        )
    if is_tested("transformer-engine", engine.version or ""):
        return Finding(name, _version(engine), Verdict.OK)
    advice = f"wanted {TESTED_VERSIONS['transformer-engine']}: {pip_install('transformer-engine')}"
    return Finding(name, _version(engine), Verdict.NOTE, advice)


def check_apex(apex: ApexPackage) -> Finding:
    """Whether Apex is NVIDIA's; it is optional."""
    version = apex.version or "of unknown version"
    if apex.location is None:
        return Finding("Apex", "not installed; optional", Verdict.OK)
    if not apex.is_nvidias:
        return Finding(
            "Apex",
            f"{version}, the unrelated package of the registry ({apex.location})",
            Verdict.NOTE,
            "pip uninstall apex: it is not NVIDIA's, and Megatron cannot use it; NVIDIA's is built from "
            "https://github.com/NVIDIA/apex and is optional",
        )
    if not apex.has_cuda_extensions:
        advice = f"build it {_NVIDIAS_INSTRUCTIONS} with its CUDA extensions, or pip uninstall apex"
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
            f"put right what the message names, or install it anew: {pip_install(distribution)}",
        )
    return None


def _version(package: InstalledPackage) -> str:
    return package.version or "of unknown version"
