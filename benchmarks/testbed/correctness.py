"""Compares the results of every variant with plain expert parallelism, with real compute.

Shape letters: L layers, I iterations, Z micro-batches, D devices, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.testbed.layer_stack import make_parameters
from benchmarks.testbed.measurement import Variant, make_groups, make_stack, micro_batch_profile
from benchmarks.testbed.stack_inputs import IterationInput, StackSize
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.strategies.ep import EpSettings

TOLERANCE = 1e-5
"""Largest accepted difference of fp32 numbers, relative to the largest value of a tensor."""
_HIDES_ALL_S = 1e6
_ITERATIONS = 3  # the first iteration has no history, so it has no replicas


def compare(
    size: StackSize,
    num_nodes: int,
    variants: Sequence[Variant],
    counts: Mapping[str, np.ndarray],
    profile: LayerProfile,
    seed: int,
) -> dict[str, float]:
    """Return the largest difference of each variant, over outputs and the gradients of inputs and experts.

    This function runs on every rank.

    Args:
        size: Small sizes of the stack.
        num_nodes: Number of nodes of the ranks.
        variants: Variants to compare.
        counts: Assignments of every workload, int64 ``[L, I, Z, D, E]``, with at least 3 iterations.
        profile: Costs that strategies know. The compute before a layer is replaced.
        seed: Seed of the tokens.
    """
    torch.set_num_threads(1)
    # With few tokens, replicas save no time. If their transfers cost nothing, strategies use replicas, which
    # are then compared.
    profile = replace(profile, non_moe_s=_HIDES_ALL_S)
    groups = make_groups(num_nodes)
    rank = dist.get_rank()
    owned = np.flatnonzero(even_owners(size.num_experts, groups.num_devices) == rank).tolist()
    worst = {}
    reference: dict[tuple[str, int], list[torch.Tensor]] = {}
    plain = Variant("plain expert parallelism", "ep", EpSettings())
    for variant in (plain, *variants):
        error = 0.0
        for number, (workload, counts_LIZDE) in enumerate(counts.items()):
            parameters = make_parameters(size, owned)
            known = micro_batch_profile(profile, counts_LIZDE.shape[2])
            stack = make_stack(variant, size, groups, parameters, None, known)
            for iteration in range(_ITERATIONS):
                counts_ZLE = counts_LIZDE[:, iteration, :, rank].swapaxes(0, 1)
                result = stack.run(IterationInput.draw(counts_ZLE, size, (seed, number, iteration, rank)))
                tensors = [result.output, result.hidden_gradient, *stack.gradients()]
                if variant is plain:
                    reference[workload, iteration] = tensors
                wanted = reference[workload, iteration]
                error = max(error, *(_difference(*pair) for pair in zip(tensors, wanted, strict=True)))
        everyones = torch.tensor(error)
        dist.all_reduce(everyones, op=dist.ReduceOp.MAX)
        if variant is not plain:
            worst[variant.name] = float(everyones)
    return worst


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    error = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
    return error if error == error else float("inf")
