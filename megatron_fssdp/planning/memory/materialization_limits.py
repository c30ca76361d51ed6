"""How many replicas a device has room for (Hecate, §4.2).

The other limit, how many experts' transfers hide under compute, is
:func:`megatron_fssdp.planning.cost.cost_model.overlap_degree`.
"""

from megatron_fssdp.planning.memory.held_replicas import HeldReplicas
from megatron_fssdp.planning.memory.memory_accounting import replica_gradients_bytes, replica_parameters_bytes

DEFAULT_RESERVE_FRACTION = 0.2
"""Part of the free memory left for fragmentation, transfers and iterations that need more than
the profiled one. Ours; the paper gives no number."""


def memory_capacity(
    free_bytes: int,
    *,
    expert_bytes: int,
    gradient_bytes_per_expert: int,
    num_experts: int,
    held: HeldReplicas,
    reserve_fraction: float = DEFAULT_RESERVE_FRACTION,
) -> int:
    """Extra expert slots a device can hold for one layer, m (Hecate, §4.2); not for lasting replicas.

    Ranks with different free memory get different answers, and all must plan with the
    lowest of them.

    Args:
        free_bytes: Device memory free at the peak of an iteration without replicas.
        expert_bytes: Parameters of one expert.
        gradient_bytes_per_expert: One expert's fp32 gradient sum over micro-batches.
        num_experts: Experts of a layer, E.
        held: When replicas are there, and of how many layers.
        reserve_fraction: Part of ``free_bytes`` to leave alone, from 0 up to but not including 1.

    Returns:
        From 0 to ``num_experts``.
    """
    if free_bytes < 0 or gradient_bytes_per_expert < 0:
        raise ValueError(
            f"free_bytes is {free_bytes} and gradient_bytes_per_expert is {gradient_bytes_per_expert}: "
            "wanted 0 or more of each"
        )
    for name, value in (
        ("expert_bytes", expert_bytes),
        ("num_layers", held.num_layers),
        ("num_experts", num_experts),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}: wanted 1 or more")
    if not 0 <= reserve_fraction < 1:
        raise ValueError(f"reserve_fraction is {reserve_fraction}: wanted a part of 1, less than all of it")
    slot_bytes = replica_parameters_bytes(1, expert_bytes, held) + replica_gradients_bytes(
        1, expert_bytes, accumulator_bytes=gradient_bytes_per_expert, held=held
    )
    usable_bytes = free_bytes - int(free_bytes * reserve_fraction)
    return min(num_experts, usable_bytes // slot_bytes)
