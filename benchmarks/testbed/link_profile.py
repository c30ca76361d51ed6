"""Measures the links between the testbed's nodes, as ``megatron-fssdp profile`` measures a cluster's."""

import torch
import torch.distributed as dist

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.megatron_adapter.diagnosis.cluster_profiler import ProfileSettings, measure_cluster


def profile_nodes(name: str, num_nodes: int, repetitions: int, flops_per_s: float) -> ClusterDescription:
    """Measure the costs of the links between the nodes and inside them. This function runs on every rank."""
    torch.set_num_threads(1)
    settings = ProfileSettings(name, num_nodes, "gloo", most_bytes=1 << 24, num_repetitions=repetitions)
    cluster = measure_cluster(
        settings, num_nodes, torch.device("cpu"), dist.get_world_size(), lambda line: print(line, flush=True)
    )
    compute = {"expert_flops_per_s": flops_per_s, "non_expert_flops_per_s": flops_per_s}
    sources = cluster.sources | dict.fromkeys(compute, "the testbed's pace")
    return cluster.model_copy(update={**compute, "sources": sources})
