"""Bytes that the experts of one rank take, calculated from their sizes.

The functions count what lives longer than one kernel: parameters, gradients, optimizer states and transfers
of the experts of one pipeline stage. They do not count activations. They also do not count what Megatron
adds: a gradient of an owned expert on its way from autograd into ``main_grad``, and the distributed
optimizer's padding. Parameters are padded to multiples of 64 elements. Buckets are padded to multiples of
some hundred elements, or of 65,536 elements when they are padded for NCCL's bus bandwidth.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_fssdp.planning.memory.held_replicas import HeldReplicas, ReplicaLife

FP32_BYTES = 4
"""Bytes of one fp32 element: of optimizer states, master weights and gradient sums."""

MAX_CHILDREN = 3
"""Most devices to which one device sends an expert in a two-level transfer.

One is the leader of the next node and two are in its own node.
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

    Raises:
        ValueError: ``num_state_tensors`` is negative.
    """

    num_state_tensors: int = 2
    has_master_weights: bool = False
    is_distributed: bool = False

    def __post_init__(self) -> None:
        if self.num_state_tensors < 0:
            raise ValueError(f"num_state_tensors is {self.num_state_tensors}: wanted 0 or more")

    @property
    def bytes_per_element(self) -> int:
        """Bytes of states and master weight of one parameter element, summed over the ranks that share it."""
        return FP32_BYTES * (self.num_state_tensors + self.has_master_weights)

    def owned_bytes(self, num_elements: int, dtype_bytes: int, num_copies: int) -> int:
        """Bytes on a rank that move when an expert changes its owner: parameters, masters, optimizer states.

        Args:
            num_elements: Number of elements of the expert's parameters.
            dtype_bytes: Bytes of one element of the parameters.
            num_copies: Number of expert-parallel groups that have the same owners (expert-data-parallel
                size). A distributed optimizer divides its states over them.
        """
        states = optimizer_state_bytes(num_elements, self, expert_data_parallel_size=num_copies)
        return num_elements * dtype_bytes + states


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
        return (
            self.replica_parameters_bytes
            + self.replica_gradients_bytes
            + self.replica_optimizer_bytes
            + self.transfer_buffers_bytes
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of owned experts, replicas and transfers together."""
        return self.expert_parallelism_bytes + self.above_expert_parallelism_bytes

    def describe(self) -> str:
        """One line for the log, with readable units."""
        return (
            f"experts {_readable(self.total_bytes)}: parameters {_readable(self.slot_parameters_bytes)}, "
            f"gradients {_readable(self.slot_gradients_bytes)}, optimizer {_readable(self.optimizer_bytes)}, "
            f"replicas at most {_readable(self.above_expert_parallelism_bytes)} (parameters "
            f"{_readable(self.replica_parameters_bytes)}, gradients "
            f"{_readable(self.replica_gradients_bytes)}, "
            f"optimizer {_readable(self.replica_optimizer_bytes)}, "
            f"transfers {_readable(self.transfer_buffers_bytes)})"
        )


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
    """Bytes of the experts of one rank, put together from the other functions of this module.

    Args:
        held: How long the rank holds replicas, and of which layers.
        slots_per_device: Number of experts that a device owns in all layers of its pipeline stage.
        replicas_per_layer: Most replicas of one layer that a device holds, m.
        owned_per_layer: Most experts of one layer that a device owns: E/D under Megatron's even map.
        expert_elements: Number of elements of one expert's parameters.
        dtype_bytes: Bytes of one element of the parameters.
        gradient_bytes: Bytes of one element of ``main_grad``.
        optimizer: What the optimizer keeps for every parameter.
        expert_data_parallel_size: Number of ranks that share a distributed optimizer.
        buffered_bytes: From the bytes of a gradient as it is sent to the bytes that a device keeps for the
            messages of one sender, see :mod:`megatron_fssdp.planning.transfer.message_size`. None means
            that a message is a whole gradient.

    Raises:
        ValueError: A number is too small.
    """
    _check_counts(
        slots_per_device=slots_per_device,
        replicas_per_layer=replicas_per_layer,
        owned_per_layer=owned_per_layer,
        expert_elements=expert_elements,
    )
    _check_positive(
        dtype_bytes=dtype_bytes,
        gradient_bytes=gradient_bytes,
        expert_data_parallel_size=expert_data_parallel_size,
    )
    expert_bytes = expert_elements * dtype_bytes
    sum_bytes = expert_elements * FP32_BYTES
    are_resident = held.life is ReplicaLife.RESIDENT
    # A device sends no experts if there are no replicas.
    sent_per_layer = owned_per_layer if replicas_per_layer else 0
    resident_elements = held.num_layers * replicas_per_layer * expert_elements if are_resident else 0
    return ExpertMemory(
        slot_parameters_bytes=slots_per_device * expert_bytes,
        slot_gradients_bytes=slots_per_device * expert_elements * gradient_bytes,
        optimizer_bytes=optimizer_state_bytes(
            slots_per_device * expert_elements,
            optimizer,
            expert_data_parallel_size=expert_data_parallel_size,
        ),
        replica_parameters_bytes=replica_parameters_bytes(replicas_per_layer, expert_bytes, held),
        replica_gradients_bytes=replica_gradients_bytes(
            replicas_per_layer, expert_bytes, accumulator_bytes=sum_bytes, held=held
        )
        + resident_elements * gradient_bytes,
        replica_optimizer_bytes=optimizer_state_bytes(
            resident_elements, optimizer, expert_data_parallel_size=expert_data_parallel_size
        ),
        packed_experts_bytes=packed_experts_bytes(
            sent_per_layer, replicas_per_layer, expert_bytes, sum_bytes=sum_bytes, held=held
        ),
        reduction_buffers_bytes=reduction_buffers_bytes(
            sent_per_layer,
            replicas_per_layer,
            gradient_bytes=sum_bytes if held.sums_gradients or are_resident else expert_bytes,
            sum_bytes=sum_bytes,
            buffered_bytes=buffered_bytes,
        ),
    )


def optimizer_state_bytes(
    num_elements: int, optimizer: ExpertOptimizer, *, expert_data_parallel_size: int
) -> int:
    """Bytes of a rank's optimizer states and master weights.

    A distributed optimizer gives every expert-data-parallel rank an equal part of the elements. The part is
    rounded up here, and padding is not counted.

    Args:
        num_elements: Number of elements of the experts' parameters on the rank.
        optimizer: What the optimizer keeps for every parameter.
        expert_data_parallel_size: Number of ranks that share a distributed optimizer.
    """
    parts = expert_data_parallel_size if optimizer.is_distributed else 1
    return -(-num_elements // parts) * optimizer.bytes_per_element


def replica_parameters_bytes(replicas_per_layer: int, expert_bytes: int, held: HeldReplicas) -> int:
    """Bytes of replicas' parameters, over all layers and micro-batches that hold replicas at the same time.

    Args:
        replicas_per_layer: Most replicas of one layer that a device holds, m.
        expert_bytes: Bytes of the parameters of one expert.
        held: How long the rank holds replicas, and of which layers.
    """
    return held.layers_with_weights * replicas_per_layer * expert_bytes


def replica_gradients_bytes(
    replicas_per_layer: int, expert_bytes: int, *, accumulator_bytes: int, held: HeldReplicas
) -> int:
    """Bytes of replicas' gradients.

    They are the gradients of one layer as its backward pass makes them, and the sums over micro-batches. The
    sums of all layers are kept in fp32 until the last micro-batch. There are no such sums if every
    micro-batch sends its gradients to the owners. A backward pass that adds gradients in the matrix product
    then still needs fp32 memory for one layer.

    Args:
        replicas_per_layer: Most replicas of one layer that a device holds, m.
        expert_bytes: Bytes of one expert's gradient in the parameters' data type.
        accumulator_bytes: Bytes of one expert's gradient sum over micro-batches.
        held: How long the rank holds replicas, and of which layers.
    """
    adds_to_own_sums = held.fuses_gradients and not held.layers_with_sums
    bytes_of_one = max(expert_bytes, accumulator_bytes) if adds_to_own_sums else expert_bytes
    made_bytes = min(held.num_layers, 1) * replicas_per_layer * bytes_of_one
    return made_bytes + held.layers_with_sums * replicas_per_layer * accumulator_bytes


def packed_experts_bytes(
    sent_per_layer: int, replicas_per_layer: int, expert_bytes: int, *, sum_bytes: int, held: HeldReplicas
) -> int:
    """Bytes of the flat copies that are made for sending: one layer's experts and its replicas' gradients.

    Sums over micro-batches are flat already and need no copy.

    Args:
        sent_per_layer: Number of owned experts of one layer that have replicas on other devices.
        replicas_per_layer: Most replicas of one layer that a device holds, m.
        expert_bytes: Bytes of one expert in the parameters' data type.
        sum_bytes: Bytes of one expert's gradient in fp32.
        held: How long the rank holds replicas, and of which layers.
    """
    if held.life is ReplicaLife.RESIDENT:
        # One layer's holders send gradients to the owners while another layer's owners send the sums back.
        return 2 * (sent_per_layer + replicas_per_layer) * sum_bytes
    all_summed = held.sums_gradients and held.life is not ReplicaLife.SELECTED
    gradients = 0 if all_summed else min(held.num_layers, 1) * replicas_per_layer
    # A layer's experts are gathered again while the gradients of the layer above are sent.
    at_once = held.life is ReplicaLife.LAYER_PASS and held.num_layers > 1
    copies = sent_per_layer + gradients if at_once else max(sent_per_layer, gradients)
    return copies * expert_bytes


def reduction_buffers_bytes(
    sent_per_layer: int,
    replicas_per_layer: int,
    *,
    gradient_bytes: int,
    sum_bytes: int,
    buffered_bytes: Callable[[int], int] | None,
) -> int:
    """Bytes of the buffers in which one layer's gradients are received and summed.

    A device receives gradients of the experts that it owns, and of replicas whose gradients it passes on. For
    each of these experts it needs buffers for the messages of each child in the transfer tree. For the
    experts that it owns it also needs the sums.

    Args:
        sent_per_layer: Number of owned experts of one layer that have replicas on other devices.
        replicas_per_layer: Most replicas of one layer that a device holds, m.
        gradient_bytes: Bytes of one expert's gradient in the data type in which it is sent.
        sum_bytes: Bytes of one expert's gradient sum at its owner.
        buffered_bytes: From the bytes of a gradient as it is sent to the bytes that a device keeps for the
            messages of one sender, see :mod:`megatron_fssdp.planning.transfer.message_size`. None means
            that a message is a whole gradient.
    """
    child_bytes = gradient_bytes if buffered_bytes is None else buffered_bytes(gradient_bytes)
    messages_bytes = (sent_per_layer + replicas_per_layer) * MAX_CHILDREN * child_bytes
    return messages_bytes + sent_per_layer * sum_bytes


def _readable(num_bytes: int) -> str:
    """The number in the largest binary unit of which it has at least 1."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _check_counts(**counts: int) -> None:
    """Raise ValueError if a number is negative."""
    for name, value in counts.items():
        if value < 0:
            raise ValueError(f"{name} is {value}: wanted 0 or more")


def _check_positive(**counts: int) -> None:
    """Raise ValueError if a number is less than 1."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: wanted 1 or more")
