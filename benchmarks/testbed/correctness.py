"""The same stack with real compute: every variant's results against plain expert parallelism."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.testbed.layer_stack import IterationInput, StackSize, make_parameters
from benchmarks.testbed.measurement import Variant, make_groups, make_stack
from benchmarks.testbed.pacing import Timeline
from megatron_fssdp.config.strategy_settings import EpSettings
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.placement import even_owners

TOLERANCE = 1e-5
"""Largest accepted difference of fp32 numbers, relative to the largest value of a tensor."""
_HIDES_ALL_S = 1e6
_ITERATIONS = 3  # the first one has no history to replicate by


def compare(
    size: StackSize,
    num_nodes: int,
    variants: Sequence[Variant],
    counts: Mapping[str, np.ndarray],
    profile: LayerProfile,
    seed: int,
) -> dict[str, float]:
    """Runs on every rank: worst difference of each variant over outputs, inputs' and experts' gradients.

    Args:
        size: Of the model part; small.
        num_nodes: Nodes of the ranks.
        variants: To compare.
        counts: ``[L, I, D, E]`` of every workload, for ``size``; at least 3 iterations.
        profile: What strategies may know of costs, the compute before a layer aside.
        seed: Of the tokens.
    """
    torch.set_num_threads(1)
    # Few tokens save no seconds: with transfers that hide entirely, replicas pay and are compared.
    profile = replace(profile, non_moe_s=_HIDES_ALL_S)
    groups = make_groups(num_nodes)
    rank = dist.get_rank()
    owned = np.flatnonzero(even_owners(size.num_experts, groups.num_devices) == rank).tolist()
    worst = {}
    reference: dict[tuple[str, int], list[torch.Tensor]] = {}
    plain = Variant("plain expert parallelism", "ep", EpSettings())
    for variant in (plain, *variants):
        error = 0.0
        for number, (workload, counts_LIDE) in enumerate(counts.items()):
            parameters = make_parameters(size, owned)
            stack = make_stack(variant, size, groups, parameters, None, Timeline(), profile)
            for iteration in range(_ITERATIONS):
                counts_LDE = counts_LIDE[:, iteration]
                inputs = IterationInput.draw(counts_LDE[:, rank], size, (seed, number, iteration, rank))
                result = stack.run(inputs, counts_LDE)
                found = [result.output, result.hidden_gradient, *stack.gradients()]
                if variant is plain:
                    reference[workload, iteration] = found
                wanted = reference[workload, iteration]
                error = max(error, *(_difference(*pair) for pair in zip(found, wanted, strict=True)))
        everyones = torch.tensor(error)
        dist.all_reduce(everyones, op=dist.ReduceOp.MAX)
        if variant is not plain:
            worst[variant.name] = float(everyones)
    return worst


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    error = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
    return error if error == error else float("inf")
