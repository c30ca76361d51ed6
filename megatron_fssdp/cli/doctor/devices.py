"""Findings about GPUs, CPU cores, back ends, a run's ranks on this machine, and its folder."""

import os
import shutil
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

if TYPE_CHECKING:
    from megatron_fssdp.config.run.run_config import RunConfig
    from megatron_fssdp.config.run.sections import ParallelismArguments

DEVICE_VARIABLE = "MEGATRON_FSSDP_DEVICE"
LEAST_FREE_BYTES = 1 << 30  # Less gives a note. A checkpoint of 75 million parameters takes about as many.

_SHOWN_PREFIXES = ("CUDA_", "NCCL_", "TORCH_", "MEGATRON_FSSDP_")
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL", "AUTH")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's report: the name of a check, and what it found on this machine."""

    name: str
    found: str
    verdict: Verdict = "ok"
    advice: str = ""  # the next step, on one line; every problem has one


def note(name: str, found: str, advice: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(name, found, "note", advice)


def problem(name: str, found: str, advice: str) -> Finding:
    """Return a finding that prevents a training."""
    return Finding(name, found, "problem", advice)


@dataclass(frozen=True)
class Gpus:
    """Accelerators of this machine that torch can use."""

    models: tuple[tuple[str, int], ...] = ()  # name and memory in bytes of each
    error: str = ""  # from asking torch for accelerators


def look_at_gpus() -> Gpus:
    """Ask torch, which must be importable."""
    import torch

    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        properties = [torch.cuda.get_device_properties(index) for index in range(count)]
        return Gpus(tuple((gpu.name, int(gpu.total_memory)) for gpu in properties))
    except Exception as raised:  # Broken drivers raise many kinds of errors.
        return Gpus(error=one_line(raised))


def shown_variables() -> Finding:
    """Return the environment variables that concern devices and communication, without secrets."""
    shown = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_SHOWN_PREFIXES) and not any(word in name for word in _SECRET_WORDS)
    ]
    return Finding("variables", " ".join(shown) or "none of CUDA_…, NCCL_…, MEGATRON_FSSDP_… is set")


def check_folder(path: Path, setting: str) -> Finding:
    """Try to write to a folder for checkpoints, which ``setting`` names, or to the nearest that exists."""
    name, nearest = "checkpoint folder", path.absolute()
    try:
        while not os.path.lexists(nearest):
            nearest = nearest.parent
        free_bytes = shutil.disk_usage(nearest).free
        with tempfile.TemporaryFile(dir=nearest) as file:  # It has no name, and the system always deletes it.
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        state = f"{path}: cannot be written ({error.strerror or type(error).__name__})"
        advice = f"make {path} a folder with free space that this user may write to"
        return problem(name, state, f"{advice}, or set another folder with {setting}")
    access = "writable" if nearest == path.absolute() else "does not exist yet, can be created"
    state = f"{path}: {access}, {free_bytes / 2**30:,.1f} GiB free"
    if free_bytes >= LEAST_FREE_BYTES:
        return Finding(name, state)
    advice = "a checkpoint takes about 14 bytes per parameter (bf16, Adam)"
    return note(name, state, f"{advice}: make room, or set another folder with {setting}")


def check_devices(gpus: Gpus, run: "RunConfig | None", has_engine: bool) -> list[Finding]:
    """Check back ends, GPUs, and whether a run, if any, fits. Torch must be importable."""
    findings = [*_backends(bool(gpus.models)), _gpus(gpus)]
    if run is not None:
        findings.append(_ranks(gpus, run.parallelism, run.training.device))
        if (size := run.parallelism.context_parallel_size) > 1 and not has_engine:
            state = f"parallelism.context_parallel_size {size} without Transformer Engine"
            advice = "install it, or set context_parallel_size to 1: its attention is needed, on GPUs"
            findings.append(problem("context parallelism", state, advice))
    return findings


def _backends(has_gpus: bool) -> list[Finding]:
    """Check gloo, which Megatron needs on GPU machines too, and NCCL, the back end between GPUs."""
    import torch
    import torch.distributed as dist

    built, not_built, install = "built into torch", "not built into torch", "from pytorch.org"
    gloo, nccl = Finding("gloo", built), Finding("NCCL", built if has_gpus else "not used without GPUs")
    if not (dist.is_available() and dist.is_gloo_available()):
        gloo = problem("gloo", not_built, f"install a torch with gloo, such as a wheel {install}")
    if has_gpus and not (dist.is_available() and dist.is_nccl_available()):
        nccl = problem("NCCL", not_built, f"install a torch with NCCL, such as a CUDA wheel {install}")
    elif has_gpus:
        with suppress(Exception):  # Some builds have no version number of NCCL, and the report only shows it.
            nccl = Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    return [gloo, nccl]


def _gpus(gpus: Gpus) -> Finding:
    import torch

    name, asked, visible = "GPUs", _asked(), os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip()
    host = f"{usable_cores()} CPU cores, {psutil.virtual_memory().total / 2**30:,.1f} GiB"
    if asked not in ("", "cpu", "cuda"):
        advice = f"set {DEVICE_VARIABLE} to cpu or cuda, or unset it"
        return problem(name, f"{DEVICE_VARIABLE} is {asked!r}", advice)
    if gpus.error:
        advice = "fix the cause that the message names; nvidia-smi shows whether the driver works"
        return problem(name, f"torch fails to use them: {gpus.error}", advice)
    if gpus.models:
        state = ", ".join(
            f"{count} × {model}, {memory_bytes / 2**30:,.1f} GiB"
            for (model, memory_bytes), count in Counter(gpus.models).items()
        )
        if asked == "cpu":
            return note(name, f"{state}; not used, because {DEVICE_VARIABLE}=cpu selects the CPU ({host})")
        return Finding(name, state)
    if asked == "cuda":
        advice = f"unset {DEVICE_VARIABLE} to run on the CPU, or use a machine with GPUs"
        return problem(name, f"none, but {DEVICE_VARIABLE}=cuda asks for them", advice)
    if asked == "cpu" or visible in ("", "-1") or not _NVIDIA_DRIVER.exists():
        hidden = f"hidden by CUDA_VISIBLE_DEVICES={visible!r}" if visible in ("", "-1") else "none"
        return note(name, f"{hidden}; ranks run on the CPU ({host})")
    state, advice = "torch is built without CUDA", "install torch's CUDA wheel from pytorch.org"
    if build := torch.version.cuda or torch.version.hip:
        state = f"torch (built for CUDA {build}) finds no GPU"
        advice = "install a driver that is new enough for torch's CUDA (nvidia-smi shows its version)"
    state = f"an NVIDIA driver is installed, but {state}"
    return problem(name, state, f"{advice}; or set {DEVICE_VARIABLE}=cpu to use the CPU")


def _ranks(gpus: Gpus, parallelism: "ParallelismArguments", device: str) -> Finding:
    name, num_ranks, started = "ranks", parallelism.nproc_per_node, os.environ.get("WORLD_SIZE")
    if started not in (None, str(parallelism.world_size)):
        return problem(
            name,
            f"torchrun started {started}, but the run has {parallelism.world_size}",
            f"start torchrun with --nnodes={parallelism.num_nodes} --nproc-per-node={num_ranks}, or change "
            "parallelism.num_nodes and parallelism.nproc_per_node",
        )
    # Under "auto", the variable decides, and then whether there are GPUs.
    wanted = (_asked() or ("cuda" if gpus.models else "cpu")) if device == "auto" else device
    on_cpu = wanted == "cpu"
    num = usable_cores() if on_cpu else len(gpus.models)
    state = f"{num_ranks} on {num} {'CPU cores' if on_cpu else 'GPUs'}"
    if parallelism.num_nodes > 1:
        state += f"; {parallelism.num_nodes - 1} other machines were not checked"
    if on_cpu and num_ranks > num:
        advice = "training is correct, but ranks share CPU cores and wait: measured times mean little"
        return note(name, state, advice)
    if on_cpu or num_ranks == num:
        return Finding(name, state)
    if num_ranks < num:
        return note(name, state, f"{num - num_ranks} GPUs are not used: --nproc {num} uses all")
    fewer = f"at most --nproc {num}, " if num else ""
    advice = f"use {fewer}--set training.device=cpu, or a machine with more GPUs"
    return problem(name, state, f"every rank needs its own GPU: {advice}")


def usable_cores() -> int:
    """Return the number of cores of this host that this process can use."""
    return len(os.sched_getaffinity(0))


def _asked() -> str:
    return os.environ.get(DEVICE_VARIABLE, "").lower()


def one_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
