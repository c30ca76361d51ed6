"""Measures the two-level and the plain form of SparseAllGather of one expert.

The bound is the time in which one node's link transfers the expert once. No device outside the owner's node
can have the expert earlier.
"""

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.testbed.measurement import make_groups
from benchmarks.testbed.report import quartiles
from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.megatron_adapter.diagnosis.cluster_profiler import ProfileSettings, measure_cluster
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import message_rule
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from tests.support.random_placement import plain_transfer


def reaches(topology: Topology) -> dict[str, list[int]]:
    """Return the sets of devices that get the expert of device 0, by name."""
    nodes, devices = topology.num_nodes, topology.devices_by_node
    half = [device for node in range(max(1, nodes // 2)) for device in devices[node]]
    return {
        "all nodes": list(range(topology.num_devices)),
        "half of the nodes": half,
        "one other node": [0, *(devices[1] if nodes > 1 else ())],
    }


def measure_transfers(
    num_nodes: int, sizes_mib: list[int], repetitions: int, payload_bytes_per_s: float, seed: int
) -> list[dict[str, Any]]:
    """Return the seconds of the slowest rank for each form, size and set of devices.

    This function runs on every rank. Each repetition has a new random order.
    """
    torch.set_num_threads(1)
    groups = make_groups(num_nodes)
    group, topology = groups.expert_parallel, groups.topology
    devices = groups.num_devices
    cells: dict[tuple[str, int, str], tuple[SparseTransfer, float]] = {}
    for size_mib in sizes_mib:
        num_elements = size_mib * 2**20 // 4
        messages = message_rule(on_cuda=False)
        for reach, holders in reaches(topology).items():
            present_ED = np.isin(np.arange(devices), holders)[None, :]
            placement = ExpertPlacement(np.zeros(1, np.int64), present_ED)
            bound_s = size_mib * 2**20 / payload_bytes_per_s if topology.node_of_device[holders[-1]] else 0.0
            for form, plan, rule in (
                ("two-level", two_level_transfer(placement, topology), messages),
                ("plain", plain_transfer(placement), None),
            ):
                transfer = SparseTransfer(
                    group, plan, num_elements=num_elements, dtype=torch.float32, messages=rule
                )
                cells[reach, size_mib, form] = transfer, bound_s
    seconds: dict[tuple[str, int, str], list[float]] = {name: [] for name in cells}
    order = np.random.default_rng(seed)
    names = list(cells)
    for repetition in range(repetitions + 1):  # the first repetition opens connections and is not measured
        for choice in order.permutation(len(names)):
            name = names[choice]
            transfer, _ = cells[name]
            owned = {e: torch.ones(transfer.num_elements) for e in transfer.shared_experts}
            received = {e: torch.zeros(transfer.num_elements) for e in transfer.received_experts}
            dist.barrier()
            begin_s = time.perf_counter()
            transfer.start_all_gather(owned, out=received).wait()
            taken = torch.tensor([time.perf_counter() - begin_s], dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if repetition:
                seconds[name].append(float(taken))
    return [
        {
            "reach": name[0],
            "mib": name[1],
            "form": name[2],
            "seconds": quartiles(seconds[name]),
            "bound_s": bound_s,
            "over_bound": quartiles(seconds[name])[1] / bound_s if bound_s else None,
        }
        for name, (_, bound_s) in cells.items()
    ]


def profile_nodes(name: str, num_nodes: int, repetitions: int, flops_per_s: float) -> ClusterDescription:
    """Measure the costs of the links between the nodes and inside them. This function runs on every rank.

    Args:
        name: Name of the cluster description.
        num_nodes: Number of nodes of the ranks.
        repetitions: Number of measurements of each size.
        flops_per_s: Pace of compute, in floating-point operations per second.
    """
    torch.set_num_threads(1)
    settings = ProfileSettings(name, num_nodes, "gloo", most_bytes=1 << 24, num_repetitions=repetitions)
    cluster = measure_cluster(
        settings, num_nodes, torch.device("cpu"), dist.get_world_size(), lambda line: print(line, flush=True)
    )
    compute = {"expert_flops_per_s": flops_per_s, "non_expert_flops_per_s": flops_per_s}
    sources = cluster.sources | dict.fromkeys(compute, "the testbed's pace")
    return cluster.model_copy(update={**compute, "sources": sources})


def transfer_table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table with one line for each set of devices and size."""
    lines = [
        "| to | MiB | NIC bound s | two-level s | over bound | plain s | over bound |",
        "|---|---|---|---|---|---|---|",
    ]
    forms = {(row["reach"], row["mib"], row["form"]): row for row in rows}
    for reach, mib in dict.fromkeys((row["reach"], row["mib"]) for row in rows):
        cells = []
        for form in ("two-level", "plain"):
            row = forms[reach, mib, form]
            low, median, high = row["seconds"]
            over = row["over_bound"]
            cells.append(f"{median:.3f} [{low:.3f}, {high:.3f}] | {'–' if over is None else f'{over:.2f}'}")
        lines.append(
            f"| {reach} | {mib} | {forms[reach, mib, 'plain']['bound_s']:.3f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)
