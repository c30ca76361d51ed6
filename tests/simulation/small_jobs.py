"""Jobs and clusters small enough to work out by hand."""

import numpy as np

from megatron_fssdp.cli.analysis.strategy_ranking import ranked_strategies
from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.strategy.strategy_registry import strategy_settings
from megatron_fssdp.records.loads import RecordedLoads
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.simulator import simulate


def settings_of(name, **keys):
    return strategy_settings(name, dict(keys), "test")


def cluster_of(*, nodes=1, per_node=2, near_alpha_s=0.0, far_alpha_s=0.0, **more):
    """Links of 1,000 bytes/s inside a node and a NIC of 100 for all of it, 10 expert FLOP/s, 5 others."""
    return ClusterDescription.model_validate(
        {
            "name": "by hand",
            "num_nodes": nodes,
            "devices_per_node": per_node,
            "intra_node": {"alpha_s": near_alpha_s, "bandwidth_bytes_per_s": 1000},
            "inter_node": {"alpha_s": far_alpha_s, "bandwidth_bytes_per_s": 100},
            "inter_device": {"alpha_s": far_alpha_s, "bandwidth_bytes_per_s": 100},
            "expert_flops_per_s": 10,
            "non_expert_flops_per_s": 5,
            **more,
        }
    )


def job_of(*, devices=2, experts=2, layers=1, **more):
    """Tokens of 6 bytes (10 with the probability), experts of 50 elements in 2 bytes, 3 FLOPs a token."""
    keys = {
        "num_devices": devices,
        "num_experts": experts,
        "top_k": 1,
        "tokens_per_micro_batch": 8,
        "num_micro_batches": 1,
        "token_bytes": 6,
        "expert_elements": 50,
        "expert_flops_per_token": 3.0,
        "dtype_bytes": 2,
        "gradient_bytes": 4,
        "before_layer_flops_L": (0.0,) * layers,
        "before_gate_flops_L": (20.0,) * layers,
    }
    return MoeJob(**(keys | more))


def outcome_of(name, counts, *, keys=None, cluster=None, past=None, **job):
    """A simulation of the loads' devices, experts and layers, on nodes of two devices."""
    layers, devices, experts = counts.shape[-3:]
    described = job_of(**{"devices": devices, "experts": experts, "layers": layers, **job})
    settings, cluster = settings_of(name, **(keys or {})), cluster or cluster_of(nodes=devices // 2)
    return simulate(name, settings, counts, cluster, described, past_ILDE=past)


def ranking(*names, num_iterations=12, popular=100, **cluster):
    """Rank strategies on equal loads: one expert has ``popular`` tokens of each device, others have 4."""
    counts_DE = np.full((4, 8), 4, np.int32)
    counts_DE[:, 0] = popular
    counts_ILDE = np.broadcast_to(counts_DE, (num_iterations, 1, 4, 8)).copy()
    record = RecordedLoads(counts_ILDE, np.arange(1, num_iterations + 1), np.array([1]))
    job = job_of(devices=4, experts=8, tokens_per_micro_batch=128)
    settings = {name: settings_of(name) for name in names}
    return ranked_strategies("", record, cluster_of(nodes=2, **cluster), job, settings)


def loads(*counts_DE, layers=1):
    """Each iteration's counts for all layers, ``[I, L, D, E]``."""
    return np.repeat(np.array(counts_DE, np.int32)[:, None], layers, axis=1)
