"""Turns measurements of a run's first iterations into the costs that its planners use."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.link_probes import measure_links
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile, measured_messages
from megatron_fssdp.planning.memory import HeldReplicas, memory_capacity
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
from megatron_fssdp.runtime.slots.remap.shares import seconds_of_shares


def profile_layers(
    layers: Sequence[SlotLayer],
    groups: Sequence[dist.ProcessGroup],
    *,
    free_bytes: int,
    num_micro_batches: int,
    held: HeldReplicas,
    **known: Any,
) -> None:
    """Set the profile in the layers' contexts from their stopwatches and from a measurement of links.

    All ranks of all groups must call it. Layers with the same shape have the same costs, so their times are
    combined; this also reduces the noise of a few iterations. All ranks that plan together or share owners
    get the same numbers: those of the slowest compute and of the least memory.

    The groups are those of expert-parallel, expert-tensor-parallel and expert-data-parallel ranks.
    ``free_bytes`` are free on this rank's device at the memory peak of an iteration, and ``held`` says for
    how many layers, and how long, replicas exist at the same time. The other arguments are fields of
    :class:`LayerProfile`.
    """
    first, device = layers[0], layers[0].local.experts.device
    layout = first.local.experts.layout()
    flops_per_token = 2.0 * sum(shape.numel() for shape in layout.shapes if len(shape) == 2)
    watches = [watch for layer in layers if (watch := layer.local.stopwatch) is not None]
    rows, experts_s = sum(w.num_rows for w in watches), sum(w.experts_s() for w in watches)
    before_s = [w.before_s() for w in watches]
    where = first.groups
    measured = measure_links(where.expert_parallel, where.topology, device, layout.num_bytes)
    links = (measured.near, measured.far_of_node, measured.far_of_device)
    context = first.local.context
    shares_s = seconds_of_shares(context.num_experts, context.topology, device)
    numbers = torch.tensor(
        [
            # Compute must hide a transfer on every rank, so the shortest time counts. The signs make the
            # maximum over ranks a minimum.
            -min(before_s, default=0.0),
            experts_s / rows / flops_per_token if rows else 0.0,
            -float(free_bytes),
            shares_s,
            float(num_micro_batches),
            *(cost for link in links for cost in (link.alpha_s, link.beta_s_per_byte)),
        ],
        dtype=torch.float64,
        device=device,
    )
    for group in groups:
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    non_moe, flop_s, free, shares_s, most_micro_batches, *costs = numbers.tolist()
    near, far, far_of_device = map(LinkCost, costs[::2], costs[1::2])
    cluster = ClusterCost(near, far, 1 / flop_s if flop_s else 1e15, far_of_device)
    messages = measured_messages(cluster, on_cuda=device.type == "cuda")
    held = held.for_at_least(int(most_micro_batches))
    capacity, mixed_capacity = memory_capacity(
        int(-free),
        held,
        num_experts=context.num_experts,
        owned_per_layer=-(-context.num_experts // context.num_devices),
        # Between CPUs, messages are so small that the reserve covers them.
        messages=messages if device.type == "cuda" else None,
    )
    profile = LayerProfile(
        non_moe_s=-non_moe,
        cluster=cluster,
        expert_bytes=layout.num_bytes,
        flops_per_token=flops_per_token,
        memory_capacity=capacity,
        mixed_capacity=mixed_capacity,
        gradient_bytes=held.sent_bytes,
        trained_share=held.trained_share,
        num_micro_batches=int(most_micro_batches),
        messages=messages,
        exact_shares_s=shares_s,
        **known,
    )
    for layer in layers:
        layer.local.set_profile(profile)
