"""Bytes that the experts of one rank take, and how many replicas fit (Hecate, §4.2).

The functions count what lives longer than one kernel: parameters, gradients, optimizer states and transfers
of the experts of one pipeline stage. They do not count activations. They also do not count what Megatron
adds: a gradient of an owned expert on its way from autograd into ``main_grad``, and the distributed
optimizer's padding. Parameters are padded to multiples of 64 elements. Buckets are padded to multiples of
some hundred elements, or of 65,536 elements when they are padded for NCCL's bus bandwidth.

Arguments that mean the same everywhere: ``held`` says how long the device holds replicas, and of which
layers. ``expert_bytes`` are the bytes of one expert's parameters or gradient in the parameters' data type,
and ``gradient_bytes_per_expert`` those of its gradient sum over micro-batches, in fp32. ``buffered_bytes``
maps the bytes of a gradient as it is sent to the bytes that a device keeps for the messages of one sender
(:mod:`megatron_fssdp.planning.transfer.message_size`).
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from megatron_fssdp.planning.replica_life import HeldReplicas, ReplicaLife

FP32_BYTES = 4
"""Bytes of one fp32 element: of optimizer states, master weights and gradient sums."""

MAX_CHILDREN = 3
"""Most devices to which one device sends an expert in a two-level transfer: a leader and two in its node."""

RESERVE_FRACTION = 0.2
"""Part of the free memory that replicas do not use; ours, because the paper gives none.

It is left for fragmentation, for what transfers need for owned experts, and for iterations that need more
memory than the profiled one.
"""


@dataclass(frozen=True)
class ExpertOptimizer:
    """What an optimizer keeps for every expert parameter.

    Attributes:
        num_state_tensors: Number of fp32 tensors of the parameter's size: 2 for Adam (both moments), 1 for
            SGD with momentum, 0 for plain SGD.
        has_master_weights: Whether the optimizer keeps an fp32 copy of the parameter, as for half-precision
            models.
        is_distributed: Whether the states and master weights are divided over the expert-data-parallel ranks.
    """

    num_state_tensors: int = 2
    has_master_weights: bool = False
    is_distributed: bool = False

    def state_bytes(self, num_elements: int, num_copies: int) -> int:
        """Bytes of a rank's optimizer states and master weights for some elements of its parameters.

        A distributed optimizer gives each of ``num_copies`` expert-data-parallel ranks an equal part. The
        part is rounded up here, and padding is not counted.
        """
        part = -(-num_elements // (num_copies if self.is_distributed else 1))
        return part * FP32_BYTES * (self.num_state_tensors + self.has_master_weights)

    def owned_bytes(self, num_elements: int, dtype_bytes: int, num_copies: int) -> int:
        """Bytes on a rank that move with an owned expert: parameters, masters, optimizer states.

        Args:
            num_elements: Number of elements of the expert's parameters, of ``dtype_bytes`` each.
            dtype_bytes: Bytes of one element.
            num_copies: See :meth:`state_bytes`.
        """
        return num_elements * dtype_bytes + self.state_bytes(num_elements, num_copies)


@dataclass(frozen=True)
class ExpertMemory:
    """Bytes of the experts of one rank.

    The last five numbers are upper bounds: the most that can be there at the same time.

    Attributes:
        slot_parameters_bytes: Parameters of the owned experts.
        slot_gradients_bytes: ``main_grad`` of the owned experts.
        optimizer_bytes: Optimizer states and fp32 master weights of the owned experts.
        replica_parameters_bytes: Parameters of replicas.
        replica_gradients_bytes: Gradients of replicas.
        replica_optimizer_bytes: Optimizer states and fp32 master weights of resident replicas.
        packed_experts_bytes: Flat copies of experts or of their gradients that are made for sending.
        reduction_buffers_bytes: Gradients of replicas received from other devices, and their sums.
    """

    slot_parameters_bytes: int
    slot_gradients_bytes: int
    optimizer_bytes: int
    replica_parameters_bytes: int
    replica_gradients_bytes: int
    replica_optimizer_bytes: int
    packed_experts_bytes: int
    reduction_buffers_bytes: int

    @property
    def transfer_buffers_bytes(self) -> int:
        """Bytes that transfers need in addition to the replicas themselves."""
        return self.packed_experts_bytes + self.reduction_buffers_bytes

    @property
    def expert_parallelism_bytes(self) -> int:
        """Bytes of plain expert parallelism: owned experts, their gradients and their optimizer states."""
        return self.slot_parameters_bytes + self.slot_gradients_bytes + self.optimizer_bytes

    @property
    def above_expert_parallelism_bytes(self) -> int:
        """Bytes that replicas add to plain expert parallelism, with their transfers."""
        replica_bytes = self.replica_parameters_bytes + self.replica_gradients_bytes
        return replica_bytes + self.replica_optimizer_bytes + self.transfer_buffers_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of owned experts, replicas and transfers together."""
        return self.expert_parallelism_bytes + self.above_expert_parallelism_bytes

    def describe(self) -> str:
        """One line for the log, with readable units."""
        total, above = _readable(self.total_bytes), _readable(self.above_expert_parallelism_bytes)
        slots, replicas = (
            "parameters {}, gradients {}, optimizer {}".format(
                *map(_readable, astuple(self)[first : first + 3])
            )
            for first in (0, 3)
        )
        transfers = _readable(self.transfer_buffers_bytes)
        return f"experts {total}: {slots}, replicas at most {above} ({replicas}, transfers {transfers})"


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
    expert_data_parallel_size: int = 1,
    buffered_bytes: Callable[[int], int] | None = None,
) -> ExpertMemory:
    """Bytes of the experts of one rank.

    Args:
        held: See the module's text.
        slots_per_device: Number of experts that a device owns in all layers of its pipeline stage.
        replicas_per_layer: Most replicas of one layer that a device holds, m.
        owned_per_layer: Most experts of one layer that a device owns: E/D under Megatron's even map.
        expert_elements: Number of elements of one expert's parameters.
        dtype_bytes: Bytes of one element of the parameters.
        gradient_bytes: Bytes of one element of ``main_grad``.
        optimizer: What the optimizer keeps for every parameter.
        expert_data_parallel_size: Number of ranks that share a distributed optimizer.
        buffered_bytes: See the module's text. None means that a message is a whole gradient.
    """
    expert_bytes, sum_bytes = expert_elements * dtype_bytes, expert_elements * FP32_BYTES
    are_resident = held.life is ReplicaLife.RESIDENT
    resident_elements = held.num_layers * replicas_per_layer * expert_elements if are_resident else 0
    # A device sends no experts if there are no replicas.
    sent = owned_per_layer if replicas_per_layer else 0
    if are_resident:
        # One layer's holders send gradients to the owners while another layer's owners send the sums back.
        packed_bytes = 2 * (sent + replicas_per_layer) * sum_bytes
    else:
        # Sums over micro-batches are flat already and need no copy.
        all_summed = held.sums_gradients and held.life is not ReplicaLife.SELECTED
        gradients = 0 if all_summed else min(held.num_layers, 1) * replicas_per_layer
        # A layer's experts are gathered again while the gradients of the layer above are sent.
        at_once = held.life is ReplicaLife.LAYER_PASS and held.num_layers > 1
        packed_bytes = (sent + gradients if at_once else max(sent, gradients)) * expert_bytes
    # A device receives gradients of the experts that it owns, and of replicas whose gradients it passes on.
    # It buffers the messages of each child in the transfer tree. Owned experts also need the sums.
    message_bytes = sum_bytes if held.sends_fp32 else expert_bytes
    child_bytes = message_bytes if buffered_bytes is None else buffered_bytes(message_bytes)
    return ExpertMemory(
        slot_parameters_bytes=slots_per_device * expert_bytes,
        slot_gradients_bytes=slots_per_device * expert_elements * gradient_bytes,
        optimizer_bytes=optimizer.state_bytes(slots_per_device * expert_elements, expert_data_parallel_size),
        replica_parameters_bytes=held.layers_with_weights * replicas_per_layer * expert_bytes,
        replica_gradients_bytes=replicas_per_layer * _gradient_bytes(expert_bytes, sum_bytes, held)
        + resident_elements * gradient_bytes,
        replica_optimizer_bytes=optimizer.state_bytes(resident_elements, expert_data_parallel_size),
        packed_experts_bytes=packed_bytes,
        reduction_buffers_bytes=(sent + replicas_per_layer) * MAX_CHILDREN * child_bytes + sent * sum_bytes,
    )


def _gradient_bytes(expert_bytes: int, sum_bytes: int, held: HeldReplicas) -> int:
    """Bytes of the gradients that one replica of each layer has, without those of resident replicas.

    They are the gradient of one layer as its backward pass makes it, and the sums over micro-batches of all
    layers (``sum_bytes`` each). If every micro-batch sends its gradients to the owners, there are no such
    sums, but a backward pass that adds gradients in the matrix product then still needs fp32 memory for one
    layer.
    """
    adds_to_own_sums = held.fuses_gradients and not held.layers_with_sums
    made_bytes = max(expert_bytes, sum_bytes) if adds_to_own_sums else expert_bytes
    return min(held.num_layers, 1) * made_bytes + held.layers_with_sums * sum_bytes


def held_replicas_bytes(
    replicas_L: Sequence[int], *, expert_bytes: int, gradient_bytes_per_expert: int, held: HeldReplicas
) -> int:
    """Bytes of a device's replicas of each layer at the peak of an iteration, without transfers' buffers."""
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
) -> int:
    """Number of replicas that a device can hold for one layer, m (Hecate, §4.2), from 0 to ``num_experts``.

    This is not for resident replicas, which also need gradients and optimizer states. Ranks with different
    free memory get different results. All ranks must plan with the lowest one. The other limit is how many
    experts can be transferred while the device computes
    (:func:`megatron_fssdp.planning.cost.cost_model.overlap_degree`).

    Args:
        free_bytes: Device memory that is free at the peak of an iteration without replicas.
        expert_bytes: See the module's text, also for the next argument and ``held``.
        gradient_bytes_per_expert: See there.
        num_experts: Number of experts of a layer, E.
        held: See there.
        buffered_bytes: See the module's text. Each replica of a layer can pass on the gradients of
            :data:`MAX_CHILDREN` senders. None counts no buffers.

    Raises:
        ValueError: A number of bytes, layers or experts is too small.
    """
    sizes = {"expert_bytes": expert_bytes, "num_layers": held.num_layers, "num_experts": num_experts}
    for name, value in {"free_bytes": free_bytes, **sizes}.items():
        least = 0 if name == "free_bytes" else 1
        if value < least:
            raise ValueError(f"{name} is {value}: wanted {least} or more")
    slot_bytes = held.layers_with_weights * expert_bytes
    slot_bytes += _gradient_bytes(expert_bytes, gradient_bytes_per_expert, held)
    if buffered_bytes is not None:
        sent_bytes = gradient_bytes_per_expert if held.sends_fp32 else expert_bytes
        slot_bytes += MAX_CHILDREN * buffered_bytes(sent_bytes)
    usable_bytes = free_bytes - int(free_bytes * RESERVE_FRACTION)
    return min(num_experts, usable_bytes // slot_bytes)


def _readable(num_bytes: int) -> str:
    """The number in the largest binary unit of which it has at least 1."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
