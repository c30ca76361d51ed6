"""Bytes that the experts of one rank take, and how many replicas fit (Hecate, §4.2).

Counted is what lives longer than one kernel: parameters, gradients, optimizer states and transfers of the
experts of one pipeline stage. Activations are not, nor what Megatron adds: a gradient of an owned expert on
its way into ``main_grad``, and padding. Everywhere, ``held`` says how long the device holds replicas, and of
which layers. An expert has ``expert_elements`` parameters of ``dtype_bytes`` bytes each. Gradient sums over
micro-batches are in fp32. ``messages`` is the rule by which transfers divide an expert.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import cycle, islice

from megatron_fssdp.planning.replica_life import HeldReplicas, ReplicaLife
from megatron_fssdp.planning.transfer.message_size import MessageRule

FP32_BYTES = 4
"""Bytes of one fp32 element: of optimizer states, master weights and gradient sums."""

MAX_CHILDREN = 3
"""Most devices to which one device sends an expert in a two-level transfer: a leader and two in its node."""

RESERVE_FRACTION = 0.2
"""Part of the free memory that replicas do not use; ours, because the paper gives none.

It is for fragmentation, transfers of owned experts, and iterations that need more than the profiled one.
"""


@dataclass(frozen=True)
class ExpertOptimizer:
    """What an optimizer keeps for every expert parameter.

    Attributes:
        num_state_tensors: Fp32 tensors of the parameter's size: 2 for Adam, 1 for SGD with momentum.
        has_master_weights: Whether it keeps an fp32 copy of the parameter, as for half-precision models.
        is_distributed: Whether the expert-data-parallel ranks share the states and master weights.
    """

    num_state_tensors: int = 2
    has_master_weights: bool = False
    is_distributed: bool = False

    def state_bytes(self, num_elements: int, num_copies: int) -> int:
        """Bytes of a rank's states and master weights; ``num_copies`` ranks may share equal parts."""
        part = -(-num_elements // (num_copies if self.is_distributed else 1))
        return part * FP32_BYTES * (self.num_state_tensors + self.has_master_weights)

    def owned_bytes(self, num_elements: int, dtype_bytes: int, num_copies: int) -> int:
        """Bytes that move with an owned expert: parameters, masters, optimizer states."""
        return num_elements * dtype_bytes + self.state_bytes(num_elements, num_copies)


@dataclass(frozen=True)
class ExpertMemory:
    """Bytes of one rank's owned experts and replicas: parameters, ``main_grad`` and optimizer.

    The last four numbers are upper bounds; only resident replicas have an optimizer. Buffers are flat copies
    for sending, received gradients, and their sums.
    """

    slot_parameters_bytes: int
    slot_gradients_bytes: int
    optimizer_bytes: int
    replica_parameters_bytes: int
    replica_gradients_bytes: int
    replica_optimizer_bytes: int
    transfer_buffers_bytes: int

    @property
    def expert_parallelism_bytes(self) -> int:
        """Bytes of plain expert parallelism: owned experts, their gradients and optimizer states."""
        return sum(astuple(self)[:3])

    @property
    def above_expert_parallelism_bytes(self) -> int:
        """Bytes that replicas add to plain expert parallelism, with their transfers."""
        return sum(astuple(self)[3:])

    @property
    def total_bytes(self) -> int:
        """Bytes of owned experts, replicas and transfers together."""
        return sum(astuple(self))

    def describe(self) -> str:
        """One line for the log."""
        sizes = (self.total_bytes, *astuple(self)[:3], self.above_expert_parallelism_bytes)
        return (
            "experts {}: parameters {}, gradients {}, optimizer {}, replicas at most {} (parameters {}, "
            "gradients {}, optimizer {}, transfers {})"
        ).format(*map(_readable, (*sizes, *astuple(self)[3:])))


def expert_memory(
    *,
    held: HeldReplicas,
    slots_per_device: int,
    replicas_per_layer: int,
    owned_per_layer: int,
    expert_elements: int,
    dtype_bytes: int,
    gradient_bytes: int,
    optimizer: ExpertOptimizer,
    expert_data_parallel_size: int,
    messages: MessageRule,
) -> ExpertMemory:
    """Bytes of the experts of one rank; the module's text explains the other arguments.

    A device owns ``slots_per_device`` experts in all layers of its pipeline stage, and at most
    ``owned_per_layer`` of one layer: E/D under Megatron's even map. It holds at most ``replicas_per_layer``
    replicas of one layer, m. An element of ``main_grad`` has ``gradient_bytes``.
    """
    expert_bytes, sum_bytes = expert_elements * dtype_bytes, expert_elements * FP32_BYTES
    are_resident = held.life is ReplicaLife.RESIDENT
    resident_elements = held.stage.num_layers * replicas_per_layer * expert_elements if are_resident else 0
    # A device sends no experts if there are no replicas.
    sent = owned_per_layer if replicas_per_layer else 0
    if are_resident:
        # One layer's holders send gradients to the owners while another layer's owners send the sums back.
        packed_bytes = 2 * (sent + replicas_per_layer) * sum_bytes
    else:
        # Sums over micro-batches are flat already and need no copy.
        all_summed = held.sums_gradients and held.life is not ReplicaLife.SELECTED
        gradients = 0 if all_summed else min(held.stage.num_layers, 1) * replicas_per_layer
        # A layer's experts are gathered again while the gradients of the layer above are sent.
        at_once = held.life is ReplicaLife.LAYER_PASS and held.stage.num_layers > 1
        packed_bytes = (sent + gradients if at_once else max(sent, gradients)) * expert_bytes
    # A device receives gradients of the experts that it owns, and of replicas whose gradients it passes on.
    # It buffers the messages of each child in the transfer tree. Owned experts also need the sums.
    received_bytes = (sent + replicas_per_layer) * _received_bytes(held, expert_bytes, sum_bytes, messages)
    gradients_bytes = replicas_per_layer * _gradient_bytes(held, expert_bytes, sum_bytes)
    return ExpertMemory(
        slot_parameters_bytes=slots_per_device * expert_bytes,
        slot_gradients_bytes=slots_per_device * expert_elements * gradient_bytes,
        optimizer_bytes=optimizer.state_bytes(slots_per_device * expert_elements, expert_data_parallel_size),
        replica_parameters_bytes=replicas_per_layer * _weights_bytes(held, expert_elements, dtype_bytes),
        replica_gradients_bytes=gradients_bytes + resident_elements * gradient_bytes,
        replica_optimizer_bytes=optimizer.state_bytes(resident_elements, expert_data_parallel_size),
        transfer_buffers_bytes=packed_bytes + received_bytes + sent * sum_bytes,
    )


def memory_capacity(
    free_bytes: int,
    held: HeldReplicas,
    *,
    expert_elements: int,
    dtype_bytes: int,
    num_experts: int,
    messages: MessageRule | None,
) -> int:
    """Number of replicas that a device can hold for one layer, m (Hecate, §4.2), from 0 to ``num_experts``.

    This is not for resident replicas. All ranks must plan with the lowest number of any. ``free_bytes`` are
    free at the peak of an iteration without replicas. Without ``messages``, no buffers are counted for the
    gradients that a replica's device passes on.
    """
    expert_bytes, sum_bytes = expert_elements * dtype_bytes, expert_elements * FP32_BYTES
    weights_bytes = _weights_bytes(held, expert_elements, dtype_bytes)
    slot_bytes = weights_bytes + _gradient_bytes(held, expert_bytes, sum_bytes)
    if messages is not None:
        slot_bytes += _received_bytes(held, expert_bytes, sum_bytes, messages)
    usable_bytes = max(free_bytes - int(free_bytes * RESERVE_FRACTION), 0)
    return min(num_experts, usable_bytes // slot_bytes)


def held_replicas_bytes(
    replicas_L: Sequence[int], held: HeldReplicas, *, expert_elements: int, dtype_bytes: int
) -> int:
    """Bytes of a device's replicas of each layer at the peak of an iteration, without transfers' buffers."""
    most_first = sorted(replicas_L, reverse=True)
    num_bytes = sum(most_first[: held.layers_with_weights]) * dtype_bytes
    num_bytes += sum(most_first[: held.layers_with_sums]) * FP32_BYTES
    copies = sum(islice(cycle(most_first), held.layers_with_copies))  # of several micro-batches
    return int(expert_elements * (num_bytes + copies * held.copy_bytes))


def _weights_bytes(held: HeldReplicas, expert_elements: int, dtype_bytes: int) -> int:
    """Bytes of the weights that one replica of each layer has, with their quantized copies."""
    copy_bytes = held.layers_with_copies * held.copy_bytes
    return int(expert_elements * (held.layers_with_weights * dtype_bytes + copy_bytes))


def _gradient_bytes(held: HeldReplicas, expert_bytes: int, sum_bytes: int) -> int:
    """Bytes of gradients of one replica of each layer: one layer's as they are made, and all sums."""
    # Without such sums, a backward pass that adds gradients in the matrix product needs fp32 for one layer.
    adds_to_own_sums = held.fuses_gradients and not held.layers_with_sums
    made_bytes = max(expert_bytes, sum_bytes) if adds_to_own_sums else expert_bytes
    return min(held.stage.num_layers, 1) * made_bytes + held.layers_with_sums * sum_bytes


def _received_bytes(held: HeldReplicas, expert_bytes: int, sum_bytes: int, messages: MessageRule) -> int:
    """Bytes of the messages with gradients of one expert that a device can have received at a time."""
    return MAX_CHILDREN * messages.buffered_bytes(sum_bytes if held.sends_fp32 else expert_bytes)


def _readable(num_bytes: int) -> str:
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{num_bytes / 1024**power:.{1 if power else 0}f} {unit}"
