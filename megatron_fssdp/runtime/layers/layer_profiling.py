"""Turns measurements of a run's first iterations into the costs that its planners use."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.link_probes import measure_links
from megatron_fssdp.planning.cost.cost_model import ClusterCost
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.cost.layer_profile import LayerProfile, measured_messages
from megatron_fssdp.planning.memory import FP32_BYTES, memory_capacity
from megatron_fssdp.planning.replica_life import HeldReplicas
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
from megatron_fssdp.runtime.slots.remap.shares import seconds_of_shares


def profile_layers(
    layers: Sequence[SlotLayer],
    groups: Sequence[dist.ProcessGroup],
    *,
    free_bytes: int,
    token_bytes: int,
    owned_bytes: int,
    num_micro_batches: int,
    held: HeldReplicas,
    device: torch.device,
    choices: TokenChoices | None = None,
    deduplicated: bool = False,
) -> None:
    """Set the profile in the layers' contexts from their stopwatches and from a measurement of links.

    All ranks of all groups must call it. Layers with the same shape have the same costs, so their times are
    combined; this also reduces the noise of a few iterations. All ranks that plan together or share owners
    get the same numbers: those of the slowest compute and of the least memory.

    The groups are those of expert-parallel, expert-tensor-parallel and expert-data-parallel ranks.
    ``free_bytes`` are free on this rank's device at the memory peak of an iteration, ``held`` says for how
    many layers, and how long, replicas exist at the same time, and ``device`` has the tensors for
    collectives. The other arguments are fields of :class:`LayerProfile`.
    """
    first = layers[0]
    layout = first.experts.layout()
    flops_per_token = 2.0 * sum(shape.numel() for shape in layout.shapes if len(shape) == 2)
    watches = [layer.stopwatch for layer in layers if layer.stopwatch is not None]
    rows, experts_s = sum(w.num_rows for w in watches), sum(w.experts_s() for w in watches)
    before_s = [w.before_s() for w in watches]
    where = first.groups
    intra, inter = measure_links(where.expert_parallel, where.topology, device, layout.num_bytes)
    context = first.context
    shares_s = seconds_of_shares(context.num_experts, context.topology, device)
    numbers = torch.tensor(
        [
            # Compute must hide a transfer on every rank, so the shortest time counts. The signs make the
            # maximum over ranks a minimum.
            -min(before_s, default=0.0),
            experts_s / rows / flops_per_token if rows else 0.0,
            intra.alpha_s,
            intra.beta_s_per_byte,
            inter.alpha_s,
            inter.beta_s_per_byte,
            -float(free_bytes),
            shares_s,
        ],
        dtype=torch.float64,
        device=device,
    )
    for group in groups:
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    non_moe, flop_s, intra_alpha, intra_beta, inter_alpha, inter_beta, free, shares_s = numbers.tolist()
    cluster = ClusterCost(
        replace(intra, alpha_s=intra_alpha, beta_s_per_byte=intra_beta),
        replace(inter, alpha_s=inter_alpha, beta_s_per_byte=inter_beta),
        expert_flops_per_s=1 / flop_s if flop_s else 1e15,
    )
    messages = measured_messages(cluster, on_cuda=device.type == "cuda")
    capacity, mixed_capacity = memory_capacity(
        int(-free),
        held,
        expert_elements=layout.numel,
        dtype_bytes=layout.dtype.itemsize,
        num_experts=first.context.num_experts,
        # Between CPUs, messages are so small that the reserve covers them.
        messages=messages if device.type == "cuda" else None,
    )
    profile = LayerProfile(
        non_moe_s=-non_moe,
        cluster=cluster,
        expert_bytes=layout.num_bytes,
        token_bytes=token_bytes,
        flops_per_token=flops_per_token,
        memory_capacity=capacity,
        mixed_capacity=mixed_capacity,
        gradient_bytes=layout.numel * FP32_BYTES if held.sends_fp32 else layout.num_bytes,
        num_micro_batches=num_micro_batches,
        owned_bytes=owned_bytes,
        messages=messages,
        choices=choices,
        deduplicated=deduplicated,
        exact_shares_s=shares_s,
    )
    for layer in layers:
        layer.context = replace(layer.context, profile=profile)
        layer.stopwatch = None
