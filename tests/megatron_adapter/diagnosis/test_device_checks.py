"""The doctor's verdicts on devices and ranks."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_fssdp.config.run.parallelism_settings import ParallelismSettings
from megatron_fssdp.megatron_adapter.diagnosis.device_checks import (
    Launch,
    check_context,
    check_gloo,
    check_gpus,
    check_nccl,
    check_ranks,
    check_topology,
)
from megatron_fssdp.megatron_adapter.diagnosis.devices import Backends, Devices
from megatron_fssdp.megatron_adapter.diagnosis.examination import diagnose
from megatron_fssdp.megatron_adapter.diagnosis.finding import Verdict
from tests.megatron_adapter.diagnosis.machine_examples import (
    ALL_BACKENDS,
    CPU_ONLY,
    EIGHT_GPUS,
    HEALTHY,
    NOTE,
    OK,
    PROBLEM,
    run_config,
    verdicts,
)


def test_the_verdict_on_back_ends_follows_from_the_machine() -> None:
    nothing = Backends(has_gloo=False, has_nccl=False)
    assert check_gloo(ALL_BACKENDS).verdict is OK
    assert check_gloo(nothing).verdict is PROBLEM
    assert check_nccl(nothing, has_gpus=False).verdict is OK
    assert check_nccl(nothing, has_gpus=True).verdict is PROBLEM
    assert check_nccl(ALL_BACKENDS, has_gpus=True).found == "2.30.7"


@pytest.mark.parametrize(
    ("devices", "verdict", "words"),
    [
        (EIGHT_GPUS, OK, "8 × NVIDIA H100 80GB HBM3, 80.0 GiB"),
        (replace(EIGHT_GPUS, asked="cpu"), NOTE, "not used"),
        (replace(EIGHT_GPUS, gpu_error="RuntimeError: Xid"), PROBLEM, "Xid"),
        (CPU_ONLY, NOTE, "none; ranks run on the CPU (2 CPU cores, 8.0 GiB)"),
        (replace(CPU_ONLY, asked="cuda"), PROBLEM, "asks for them"),
        (replace(CPU_ONLY, asked="gpu"), PROBLEM, "'gpu'"),
        (replace(CPU_ONLY, has_nvidia_driver=True), PROBLEM, "without CUDA"),
        (replace(CPU_ONLY, has_nvidia_driver=True, cuda_build="13.0"), PROBLEM, "CUDA 13.0"),
        (replace(CPU_ONLY, has_nvidia_driver=True, cuda_build="13.0", visible=""), NOTE, "hidden"),
        (replace(CPU_ONLY, has_nvidia_driver=True, asked="cpu"), NOTE, "none"),
    ],
)
def test_the_verdict_on_gpus_follows_from_the_machine(devices: Devices, verdict: Verdict, words: str) -> None:
    finding = check_gpus(devices)
    assert finding.verdict is verdict
    assert words in finding.found


@pytest.mark.parametrize(
    ("devices", "launch", "cut", "verdict", "found"),
    [
        (EIGHT_GPUS, Launch(), None, OK, "1 node (this machine) of 8 GPUs"),
        (CPU_ONLY, Launch(), None, OK, "1 node (this machine) of CPU ranks"),
        (EIGHT_GPUS, Launch(16, 8), None, OK, "2 nodes of 8 ranks, from torchrun"),
        (EIGHT_GPUS, Launch(20, 8), None, PROBLEM, "3 nodes of 8/8/4 ranks, from torchrun"),
        (EIGHT_GPUS, Launch(4, None), None, OK, "1 node of 4 ranks, from torchrun"),
        (
            CPU_ONLY,
            Launch(),
            {"nproc_per_node": 4, "declared_nodes": 2},
            OK,
            "1 node of 4 ranks, from the run's file; strategies plan for 2 nodes (declared_nodes)",
        ),
        (
            replace(EIGHT_GPUS, pairs_without_peer_access=((0, 4),)),
            Launch(),
            None,
            NOTE,
            "1 node (this machine) of 8 GPUs; no peer access between GPUs 0-4",
        ),
    ],
)
def test_the_verdict_on_the_topology_follows_from_the_machine(
    devices: Devices, launch: Launch, cut: Any, verdict: Verdict, found: str
) -> None:
    finding = check_topology(devices, launch, ParallelismSettings(**cut) if cut else None)
    assert (finding.verdict, finding.found) == (verdict, found)


@pytest.mark.parametrize(
    ("devices", "launch", "cut", "wanted", "verdict", "words"),
    [
        (CPU_ONLY, Launch(), {"nproc_per_node": 2}, "auto", OK, "2 on 2 CPU cores"),
        (CPU_ONLY, Launch(), {"nproc_per_node": 4}, "auto", NOTE, "4 on 2 CPU cores"),
        (CPU_ONLY, Launch(), {"nproc_per_node": 2}, "cuda", PROBLEM, "2 on 0 GPUs"),
        (EIGHT_GPUS, Launch(), {"nproc_per_node": 8}, "auto", OK, "8 on 8 GPUs"),
        (EIGHT_GPUS, Launch(), {"nproc_per_node": 16}, "auto", PROBLEM, "16 on 8 GPUs"),
        (EIGHT_GPUS, Launch(), {"nproc_per_node": 4}, "cuda", NOTE, "4 on 8 GPUs"),
        (EIGHT_GPUS, Launch(), {"nproc_per_node": 4}, "cpu", OK, "4 on 64 CPU cores"),
        (EIGHT_GPUS, Launch(), {"nproc_per_node": 8, "num_nodes": 3}, "auto", OK, "2 other machines"),
        (EIGHT_GPUS, Launch(16, 8), {"nproc_per_node": 8, "num_nodes": 2}, "auto", OK, "8 on 8 GPUs"),
        (EIGHT_GPUS, Launch(8, 8), {"nproc_per_node": 8, "num_nodes": 2}, "auto", PROBLEM, "has 16"),
        (replace(EIGHT_GPUS, asked="cpu"), Launch(), {"nproc_per_node": 4}, "auto", OK, "CPU cores"),
    ],
)
def test_the_verdict_on_ranks_follows_from_the_machine(
    devices: Devices, launch: Launch, cut: dict[str, int], wanted: str, verdict: Verdict, words: str
) -> None:
    finding = check_ranks(devices, launch, ParallelismSettings(**cut), wanted)
    assert finding.verdict is verdict
    assert words in finding.found


def test_context_parallelism_needs_transformer_engine_and_gpus() -> None:
    assert check_context(EIGHT_GPUS, True, 2, "auto").verdict is OK
    assert check_context(EIGHT_GPUS, False, 2, "auto").verdict is PROBLEM
    assert check_context(CPU_ONLY, True, 2, "auto").verdict is PROBLEM
    facts = replace(HEALTHY, devices=EIGHT_GPUS)
    findings = verdicts(diagnose(facts, run_config(nproc_per_node=8, context=2)))
    assert findings["context parallelism"] is PROBLEM
