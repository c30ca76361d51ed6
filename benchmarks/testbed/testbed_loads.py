"""Loads of the testbed: a recorded layer at the sizes of an experiment, and how uneven loads are.

Shape letters: I iterations, D devices, E experts.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.planning.loads import max_over_mean
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.simulation.workloads import Counts, WorkloadShape, counts_of_shares


def expert_max_over_mean(counts_DE: Counts) -> float:
    """Return the assignments of the most popular expert divided by the mean, or 1 without assignments."""
    return max_over_mean(counts_DE.sum(axis=0))


def device_max_over_mean(counts_DE: Counts) -> float:
    """Return the max/mean device load if every expert is computed by its owner."""
    num_devices, num_experts = counts_DE.shape
    load_D = np.zeros(num_devices, np.int64)
    np.add.at(load_D, even_owners(num_experts, num_devices), counts_DE.sum(axis=0))
    return max_over_mean(load_D)


def replay(recorded_IDE: NDArray[np.integer], shape: WorkloadShape, first_iteration: int = 0) -> Counts:
    """Adapt the recorded loads of one layer to the sizes of an experiment.

    Every source keeps its shares and gets the shape's number of tokens. If the record has fewer sources R
    than the shape has devices D, neighbours share one: device ``d`` sends as source ``d·R//D`` did. If it has
    more, device ``d`` sends what sources ``d·R/D`` to ``(d+1)·R/D - 1`` sent together.

    Args:
        recorded_IDE: Integers ``[recorded iterations, R, E]``. Assignments of every source to every expert.
        shape: Sizes of the experiment.
        first_iteration: Index of the first recorded iteration to use.

    Returns:
        int64 ``[I, D, E]``. Assignments of every source device to every expert.

    Raises:
        ValueError: The record has other experts, too few iterations, or a number of sources that does not
            match.
    """
    num_recorded, num_sources, num_experts = recorded_IDE.shape
    devices, wanted = shape.num_devices, first_iteration + shape.num_iterations
    if num_experts != shape.num_experts:
        raise ValueError(
            f"the record has {num_experts} experts, wanted {shape.num_experts}; record a model with this "
            "number"
        )
    if max(devices, num_sources) % min(devices, num_sources):
        raise ValueError(
            f"cannot map {num_sources} recorded sources to {devices} devices; one must divide the other"
        )
    if first_iteration < 0 or wanted > num_recorded:
        raise ValueError(
            f"got {num_recorded} recorded iterations, wanted {first_iteration} to {wanted - 1}; replay fewer"
        )
    chosen_IDE = np.asarray(recorded_IDE[first_iteration:wanted], dtype=np.float64)
    if num_sources >= devices:
        chosen_IDE = chosen_IDE.reshape(len(chosen_IDE), devices, -1, num_experts).sum(axis=2)
    else:
        chosen_IDE = np.repeat(chosen_IDE, devices // num_sources, axis=1)
    return counts_of_shares(chosen_IDE, np.full(devices, shape.tokens_per_device), shape.top_k)
