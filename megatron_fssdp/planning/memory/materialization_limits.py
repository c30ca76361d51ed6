"""How many replicas fit into the memory of a device (Hecate, §4.2).

The other limit is how many experts can be transferred while the device computes. It is
:func:`megatron_fssdp.planning.cost.cost_model.overlap_degree`.
"""

from collections.abc import Callable, Sequence

from megatron_fssdp.planning.memory.held_replicas import HeldReplicas
from megatron_fssdp.planning.memory.memory_accounting import (
    MAX_CHILDREN,
    replica_gradients_bytes,
    replica_parameters_bytes,
)

DEFAULT_RESERVE_FRACTION = 0.2
"""Part of the free memory that replicas do not use.

It is left for fragmentation, for what transfers need for owned experts, and for iterations that need more
memory than the profiled one.
The value is ours, because the paper gives none.
"""


def held_replicas_bytes(
    replicas_L: Sequence[int], *, expert_bytes: int, gradient_bytes_per_expert: int, held: HeldReplicas
) -> int:
    """Bytes that given replicas take on a device at the peak of an iteration, without transfers' buffers.

    Args:
        replicas_L: Number of replicas of each layer on the device.
        expert_bytes: Bytes of the parameters of one expert.
        gradient_bytes_per_expert: Bytes of one expert's gradient sum over micro-batches, in fp32.
        held: How long the device holds replicas, and of which layers.
    """
    most_first = sorted(replicas_L, reverse=True)
    num_bytes = sum(most_first[: held.layers_with_weights]) * expert_bytes
    return num_bytes + sum(most_first[: held.layers_with_sums]) * gradient_bytes_per_expert


def memory_capacity(
    free_bytes: int,
    *,
    expert_bytes: int,
    gradient_bytes_per_expert: int,
    num_experts: int,
    held: HeldReplicas,
    buffered_bytes: Callable[[int], int] | None = None,
    reserve_fraction: float = DEFAULT_RESERVE_FRACTION,
) -> int:
    """Number of replicas that a device can hold for one layer, m (Hecate, §4.2).

    This is not for resident replicas, which also need gradients and optimizer states. Ranks with different
    free memory get different results. All ranks must plan with the lowest one.

    Args:
        free_bytes: Device memory that is free at the peak of an iteration without replicas.
        expert_bytes: Bytes of the parameters of one expert.
        gradient_bytes_per_expert: Bytes of one expert's gradient sum over micro-batches, in fp32.
        num_experts: Number of experts of a layer, E.
        held: How long the device holds replicas, and of which layers.
        buffered_bytes: From the bytes of a gradient as it is sent to the bytes that a device keeps for the
            messages of one sender. Each replica of a layer can pass on the gradients of
            :data:`MAX_CHILDREN` senders. None counts no buffers.
        reserve_fraction: Part of ``free_bytes`` that replicas must not use: at least 0 and less than 1.

    Returns:
        Number of replicas, from 0 to ``num_experts``.

    Raises:
        ValueError: A number of bytes, layers or experts or the fraction is out of range.
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
        raise ValueError(f"reserve_fraction is {reserve_fraction}: wanted at least 0 and less than 1")
    slot_bytes = replica_parameters_bytes(1, expert_bytes, held) + replica_gradients_bytes(
        1, expert_bytes, accumulator_bytes=gradient_bytes_per_expert, held=held
    )
    if buffered_bytes is not None:
        sent_bytes = gradient_bytes_per_expert if held.sends_fp32 else expert_bytes
        slot_bytes += MAX_CHILDREN * buffered_bytes(sent_bytes)
    usable_bytes = free_bytes - int(free_bytes * reserve_fraction)
    return min(num_experts, usable_bytes // slot_bytes)
