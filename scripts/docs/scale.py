"""Simulates ``fssdp`` with large models on 8 to 1,024 GPUs: the numbers of docs/scale.md.

usage: python scripts/docs/scale.py FILE.json        (some minutes; writes a result of benchmarks/results)

``tables.py`` makes the page's tables from this file. One pipeline stage is simulated.

Shape letters: I iterations, L MoE layers, D devices, E experts, P pairs of expert and device.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
# Another checkout may be installed, but the numbers must be those of this one.
sys.path.insert(0, str(ROOT))

from benchmarks.host.host_table import median_ms  # noqa: E402
from benchmarks.result_file import write_result  # noqa: E402
from megatron_fssdp.config.cluster_description import ClusterDescription, load_cluster  # noqa: E402
from megatron_fssdp.config.run.composition import load_run  # noqa: E402
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES  # noqa: E402
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices  # noqa: E402
from megatron_fssdp.planning.cost.link_seconds import topology_of  # noqa: E402
from megatron_fssdp.planning.memory import FP32_BYTES  # noqa: E402
from megatron_fssdp.simulation.moe_job import MoeJob, job_of_run  # noqa: E402
from megatron_fssdp.simulation.simulator import StrategyOutcome, simulate  # noqa: E402
from megatron_fssdp.simulation.workloads import generated_loads  # noqa: E402
from megatron_fssdp.strategies.layer_plan import LayerPlan  # noqa: E402

MODELS = {
    "DeepSeek-V3": ("deepseek-v3", 16, 16),
    "Qwen3-235B-A22B": ("qwen3-235b-a22b", 2, 8),
    "Mixtral 8x22B": ("mixtral-8x22b", 4, 8),
}
"""File in configs/models, most pipeline stages, and micro-batches of an iteration."""
GPUS, NODE_GPUS, GIB = (8, 64, 256, 1024), 8, 2**30
TOKENS = 1024
"""Tokens of a device in a micro-batch: a sequence of 4,096 tokens on four context-parallel devices."""
ITERATIONS, PAST = 10, 5
"""Simulated iterations, and iterations before them, which fill the history of loads."""
LOG_NORMAL, EVEN = "lognormal-weak", "W0"
NCCL_BUFFER_MIB = 4
"""Default of NCCL_BUFFSIZE, for each pair of GPUs and channel."""
# DeepEP V2's bandwidths count tokens that do not travel: of 90 GB/s (SM90, EP 8 × 2), half stay in their
# node, and of 726 GB/s (SM100, EP 8; NVLink has 900), an eighth stays on its GPU.
DEEPEP_FAR_BYTES_PER_S, DEEPEP_NEAR_SHARE = 90e9 / 2, 726 / 900 * 7 / 8
LAYOUT = ("job", "stages × EP × copies", "MoE layers of a stage", "fits", "GiB, ep", "GiB, fssdp")
MESSAGES = ("spAG, mean", "spAG, most", "spRS, mean", "spRS, most", "GiB sent, most")
GROUPS = ("groups in all", "peers", "peers in the node", "buffers, MiB per channel")
HOST = ("planning, ms", "slots", "GiB of slots", "GiB of transfer buffers")
SECONDS = (
    "max/mean, ep",
    "max/mean, fssdp",
    "ep, s",
    "fssdp, s",
    "fssdp over ep",
    "even loads",
)
ONCE = ("ep once, s", "fssdp once, s", "both once", "only ep once")
DEEPEP = ("ep DeepEP, s", "fssdp DeepEP, s", "both DeepEP")
OTHERS = ("prophet", "fastermoe", "quota", "auto")
"""Strategies that act in the simulated iterations; ``flexmoe`` and ``smartmoe`` act every 25."""
COLUMNS = (*LAYOUT, *MESSAGES, *GROUPS, *HOST, *SECONDS, *ONCE, *DEEPEP, *OTHERS)


def stage_of(model: str, num_gpus: int) -> tuple[MoeJob, int]:
    """One pipeline stage of a model, and the number of stages, each of at least one node.

    Its devices are one expert-parallel group, or several if they are more than the experts.
    """
    file, most_stages, num_micro_batches = MODELS[model]
    # The batch of the 32 devices in the file; numbers of devices and micro-batches are replaced below.
    batch = ("training.micro_batch_size=1", "training.global_batch_size=32")
    parts = (f"models/{file}", "parallelism/h200", "training/measure")
    run = load_run([Path(part) for part in parts], batch)
    job, share = job_of_run(run), TOKENS / run.model.seq_length
    stages = min(most_stages, num_gpus // NODE_GPUS)
    num_layers, of_stage = -(-job.num_layers // stages), num_gpus // stages
    group = min(of_stage, job.num_experts)
    job = replace(
        job,
        num_devices=group,
        num_micro_batches=num_micro_batches,
        tokens_per_micro_batch=share * job.tokens_per_micro_batch,
        before_layer_flops_L=(0.0,) * num_layers,
        before_gate_flops_L=tuple(share * flops for flops in job.before_gate_flops_L[-num_layers:]),
        after_layers_flops=0.0,
        dense_elements=job.dense_elements // stages,
        expert_data_parallel_size=of_stage // group,
        data_parallel_size=of_stage,
        activation_bytes=share * job.activation_bytes,
        # As many micro-batches are in flight as there are stages; a job keeps activations of one.
        activation_bytes_per_pair=job.activation_bytes_per_pair * stages,
    )
    return job, stages


def with_deepep(cluster: ClusterDescription) -> ClusterDescription:
    """The cluster with DeepEP's published bandwidths for tokens; transfers keep the cluster's."""
    near, far = (link.model_dump() for link in (cluster.intra_node, cluster.inter_node))
    near["bandwidth_bytes_per_s"] *= DEEPEP_NEAR_SHARE
    far["bandwidth_bytes_per_s"] = DEEPEP_FAR_BYTES_PER_S
    tokens = {"all_to_all": {"intra_node": near, "inter_node": far}}
    return ClusterDescription.model_validate(cluster.model_dump() | {"collectives": tokens})


def sent_by_devices(plan: LayerPlan, job: MoeJob, cluster: ClusterDescription) -> np.ndarray:
    """Messages of a layer's spAG and of its spRS, and GiB of both, that each device sends: ``[3, D]``."""
    _, source_P, destination_P, _ = plan.transfer.table.T
    hops, elements = plan.transfer.max_depth + 1, job.expert_elements
    early = round(plan.early * elements)  # a part of the weights, which travels before the rest

    is_far = plan.transfer.crosses_nodes(topology_of(cluster, job.num_devices))

    def messages(num_bytes: int) -> int:
        rule = job.messages(cluster)
        return -(-num_bytes // max(rule.message_bytes(num_bytes, hops, is_far=is_far), 1))

    gathers = sum(messages(part * job.dtype_bytes) for part in (early, elements - early))
    out_D, back_D = (np.bincount(side_P, minlength=job.num_devices) for side_P in (source_P, destination_P))
    gib_D = elements * (job.dtype_bytes * out_D + FP32_BYTES * back_D) / GIB
    return np.stack([gathers * out_D, messages(elements * FP32_BYTES) * back_D, gib_D])


def row_of(model: str, num_gpus: int) -> list[object]:
    """The cells of :data:`COLUMNS`; ``None`` behind the memory if the model does not fit."""
    (job, stages), cluster = stage_of(model, num_gpus), load_cluster("h200")
    cluster = cluster.model_copy(update={"num_nodes": num_gpus // NODE_GPUS})
    loads = {name: generated_loads(name, job, PAST + ITERATIONS) for name in (LOG_NORMAL, EVEN)}
    group_size, sent_XD = job.num_devices, np.zeros((3, job.num_devices))

    def outcome(
        name: str, load: str, exchange: str, links: ClusterDescription = cluster, job: MoeJob = job
    ) -> StrategyOutcome:
        settings, counts_ILDE = STRATEGIES[name].settings.model_validate({"exchange": exchange}), loads[load]
        past_ILDE, now_ILDE = counts_ILDE[:PAST], counts_ILDE[PAST:]
        return simulate(name, settings, now_ILDE, links, job, past_ILDE=past_ILDE, on_plan=count)

    def count(iteration: int, layer: int, plan: LayerPlan) -> None:
        sent_XD[:] += sent_by_devices(plan, job, cluster) / ITERATIONS

    ep, copies = outcome("ep", LOG_NORMAL, "megatron"), job.expert_data_parallel_size
    layout = [f"{model}, {num_gpus:,} GPUs", f"{stages} × {group_size} × {copies}", job.num_layers]
    if ep.memory.runs_out:
        need_gib, has_gib = ep.memory.experts.total_bytes / GIB, (cluster.memory_bytes or 0) / GIB
        fits = f"no: experts alone need {need_gib:,.0f} of {has_gib:.0f} GiB"
        return [*layout, fits, *[None] * (len(COLUMNS) - len(layout) - 1)]
    ours = outcome("fssdp", LOG_NORMAL, "megatron")
    sends: list[float] = [round(float(x)) for sent_D in sent_XD[:2] for x in (sent_D.mean(), sent_D.max())]
    sends.append(round(float(sent_XD[2].max()), 1))

    def compared(*how: Any) -> list[float]:
        ep_s, ours_s = (outcome(name, *how).mean_s for name in ("ep", "fssdp"))
        return [ep_s, ours_s, ep_s / ours_s]

    even, once = compared(EVEN, "megatron"), compared(LOG_NORMAL, "deduplicated")
    fused = replace(job, choices=TokenChoices(job.top_k, is_fused=True))
    deepep = compared(LOG_NORMAL, "megatron", with_deepep(cluster), fused)
    experts, most_replicas = ours.memory.experts, int(ours.of_layers("most_replicas").max())
    slots_gib = (experts.replica_parameters_bytes + experts.replica_gradients_bytes) / GIB
    sizes = [round(result.memory.total_bytes / GIB) for result in (ep, ours)]
    near = min(group_size, NODE_GPUS) - 1
    groups = [stages * copies, group_size - 1, near, near * NCCL_BUFFER_MIB]
    planning_ms = median_ms("fssdp", job, 16)[0] * -(-job.num_layers // job.num_devices)
    host = [round(planning_ms), most_replicas, slots_gib, experts.transfer_buffers_bytes / GIB]
    most = [float(result.load_max_over_mean_IL.mean()) for result in (ep, ours)]
    seconds = [*most, ep.mean_s, ours.mean_s, ep.mean_s / ours.mean_s, even[2]]
    seconds += [*once, once[0] / ours.mean_s, *deepep]
    seconds += [ep.mean_s / outcome(name, LOG_NORMAL, "megatron").mean_s for name in OTHERS]
    numbers = [x if isinstance(x, int) else round(x, 2) for x in (*groups, *host, *seconds)]
    return [*layout, "yes", *sizes, *sends, *numbers]


if __name__ == "__main__":
    rows = [row_of(model, num_gpus) for model in MODELS for num_gpus in GPUS]
    question = "What does fssdp send, connect, plan, hold and gain with large models on 8 to 1,024 H200?"
    write_result(Path(sys.argv[1]), question, COLUMNS, rows)
