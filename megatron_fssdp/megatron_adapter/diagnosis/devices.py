"""Findings about GPUs, CPU cores, back ends, nodes, and a run's ranks on this machine."""

import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, note, problem
from megatron_fssdp.megatron_adapter.support.broken_packages import one_line
from megatron_fssdp.megatron_adapter.support.host_cores import usable_cores

if TYPE_CHECKING:
    from megatron_fssdp.config.run.run_config import RunConfig
    from megatron_fssdp.config.run.sections import ParallelismArguments

CHECKS = ("gloo", "NCCL", "GPUs", "topology")
"""The checks that need torch, of a machine without a run."""

DEVICE_VARIABLE = "MEGATRON_FSSDP_DEVICE"

_SHOWN_PREFIXES = ("CUDA_", "NCCL_", "TORCH_", "MEGATRON_FSSDP_")
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL", "AUTH")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpus:
    """Accelerators of this machine that torch can use."""

    models: tuple[tuple[str, int], ...] = ()  # name and memory in bytes of each
    error: str = ""  # from asking torch for accelerators

    def runs_on_cpu(self, wanted: str) -> bool:
        """Whether ranks run on the CPU under a run's ``training.device``: ``auto``, ``cpu`` or ``cuda``."""
        if wanted != "auto":
            return wanted == "cpu"
        return _asked() == "cpu" or (_asked() != "cuda" and not self.models)


def look_at_gpus() -> Gpus:
    """Ask torch, which must be importable."""
    import torch

    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        properties = [torch.cuda.get_device_properties(index) for index in range(count)]
        return Gpus(tuple((each.name, int(each.total_memory)) for each in properties))
    except Exception as raised:  # Broken drivers raise many kinds of errors.
        return Gpus(error=one_line(raised))


def shown_variables() -> Finding:
    """Return the environment variables that concern devices and communication, without secrets."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SHOWN_PREFIXES)}
    shown = [f"{name}={value}" for name, value in found.items() if not any(w in name for w in _SECRET_WORDS)]
    return Finding("variables", " ".join(shown) or "none of CUDA_…, NCCL_…, MEGATRON_FSSDP_… is set")


def check_devices(gpus: Gpus, run: "RunConfig | None", has_engine: bool) -> list[Finding]:
    """Check back ends, GPUs, nodes, and whether a run, if any, fits. Torch must be importable."""
    findings = [*_backends(bool(gpus.models)), _gpus(gpus), _topology(gpus, run.parallelism if run else None)]
    if run is not None:
        findings.append(_ranks(gpus, run.parallelism, gpus.runs_on_cpu(run.training.device)))
        if run.parallelism.context_parallel_size > 1 and not has_engine:
            advice = "install it, or set context_parallel_size to 1: its attention is needed, on GPUs"
            name = f"parallelism.context_parallel_size {run.parallelism.context_parallel_size}"
            findings.append(problem("context parallelism", f"{name} without Transformer Engine", advice))
    return findings


def _backends(has_gpus: bool) -> list[Finding]:
    """Check gloo, which Megatron needs on GPU machines too, and NCCL, the back end between GPUs."""
    import torch
    import torch.distributed as dist

    has_gloo = dist.is_available() and dist.is_gloo_available()
    has_nccl = dist.is_available() and dist.is_nccl_available()
    nccl = "built into torch" if has_nccl else "not built into torch"
    with suppress(Exception):  # Some builds have no version number of NCCL, and the report only shows it.
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else nccl
    return [
        Finding("gloo", "built into torch")
        if has_gloo
        else problem(
            "gloo", "not built into torch", "install a torch with gloo, such as a wheel from pytorch.org"
        ),
        Finding("NCCL", nccl if has_gpus else f"{nccl}; not used without GPUs")
        if has_nccl or not has_gpus
        else problem("NCCL", nccl, "install a torch with NCCL, such as a CUDA wheel from pytorch.org"),
    ]


def _gpus(gpus: Gpus) -> Finding:
    """Check which devices the ranks use by default."""
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
        found = ", ".join(
            f"{count} × {model}, {memory_bytes / 2**30:,.1f} GiB"
            for (model, memory_bytes), count in Counter(gpus.models).items()
        )
        if asked == "cpu":
            return note(name, f"{found}; not used, because {DEVICE_VARIABLE}=cpu selects the CPU ({host})")
        return Finding(name, found)
    found = f"none; ranks run on the CPU ({host})"
    if asked == "cuda":
        advice = f"unset {DEVICE_VARIABLE} to run on the CPU, or use a machine with GPUs"
        return problem(name, f"none, but {DEVICE_VARIABLE}=cuda asks for them", advice)
    if not _NVIDIA_DRIVER.exists() or asked == "cpu":
        return note(name, found)
    if visible in ("", "-1"):
        return note(name, f"hidden by CUDA_VISIBLE_DEVICES={visible!r}; {found}")
    found, advice = "torch is built without CUDA", "install torch's CUDA wheel from pytorch.org"
    if build := torch.version.cuda or torch.version.hip:
        found = f"torch (built for CUDA {build}) finds no GPU"
        advice = (
            "compare with nvidia-smi's CUDA version, and install a newer driver or a torch for that version"
        )
    found = f"an NVIDIA driver is installed, but {found}"
    return problem(name, found, f"{advice}; or set {DEVICE_VARIABLE}=cpu to use the CPU")


def _topology(gpus: Gpus, parallelism: "ParallelismArguments | None") -> Finding:
    """Check which nodes the strategies plan for."""
    name, started = "topology", _whole_number("WORLD_SIZE")
    if started:
        per_node = _whole_number("LOCAL_WORLD_SIZE") or started
        found = _nodes(started, per_node, "from torchrun")
        if started > per_node and started % per_node:
            advice = "start torchrun with the same --nproc-per-node on every machine: nodes must be equal"
            return problem(name, found, advice)
    elif parallelism is not None:
        found = _nodes(parallelism.world_size, parallelism.nproc_per_node, "from the run's file")
    else:
        members = _count(len(gpus.models), "GPU") if gpus.models else "CPU ranks"
        found = f"1 node (this machine) of {members}"
    if parallelism is not None and parallelism.declared_nodes is not None:
        found += f"; strategies plan for {_count(parallelism.declared_nodes, 'node')} (declared_nodes)"
    return Finding(name, found)


def _ranks(gpus: Gpus, parallelism: "ParallelismArguments", on_cpu: bool) -> Finding:
    """Check whether a run's ranks fit on this machine."""
    name, num_ranks, started = "ranks", parallelism.nproc_per_node, _whole_number("WORLD_SIZE")
    if started not in (None, parallelism.world_size):
        return problem(
            name,
            f"torchrun started {started}, but the run has {parallelism.world_size}",
            f"start torchrun with --nnodes={parallelism.num_nodes} --nproc-per-node={num_ranks}, or change "
            "parallelism.num_nodes and parallelism.nproc_per_node",
        )
    num, kind = (usable_cores(), "CPU core") if on_cpu else (len(gpus.models), "GPU")
    others = parallelism.num_nodes - 1
    elsewhere = f"; the ranks on {_count(others, 'other machine')} were not checked" if others else ""
    found = f"{num_ranks} on {_count(num, kind)}{elsewhere}"
    if on_cpu and num_ranks > num:
        advice = "training is correct, but ranks share CPU cores and wait: measured times mean little"
        return note(name, found, advice)
    if on_cpu or num_ranks == num:
        return Finding(name, found)
    if num_ranks < num:
        unused = _count(num - num_ranks, "GPU")
        return note(name, found, f"{unused} not used: --nproc {num} uses all GPUs")
    fewer = f"--nproc {num} with parallel sizes that divide it, or " if num else ""
    advice = f"use {fewer}--set training.device=cpu, or a machine with more GPUs"
    return problem(name, found, f"every rank needs its own GPU: {advice}")


def _nodes(world_size: int, per_node: int, source: str) -> str:
    sizes = [min(per_node, world_size - first) for first in range(0, world_size, per_node)]
    members = _count(sizes[0], "rank") if len(set(sizes)) == 1 else f"{'/'.join(map(str, sizes))} ranks"
    return f"{_count(len(sizes), 'node')} of {members}, {source}"


def _asked() -> str:
    return os.environ.get(DEVICE_VARIABLE, "").lower()


def _whole_number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
