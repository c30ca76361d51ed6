"""Bytes that one rank's experts take, from first principles.

What is counted is what lives longer than one kernel: parameters, gradients, optimizer state
and transfers of the experts of one pipeline stage. Activations are not, nor what
Megatron's allocator adds: a gradient of an owned expert on its way from autograd into
``main_grad``, and the distributed optimizer's padding of parameters and buckets (to multiples of
64 and of some hundred elements; of 65,536 a bucket when padded for NCCL's bus bandwidth).

Shape letters: L MoE layers of a pipeline stage, S slots of a device, m replicas a device may
hold of one layer.
"""

from dataclasses import dataclass

from megatron_fssdp.planning.memory.held_replicas import HeldReplicas, ReplicaLife

FP32_BYTES = 4
"""Bytes of an element of optimizer states, master weights and accumulators."""

MAX_CHILDREN = 3
"""To so many devices one sends an expert in a two-level transfer: the next node and two inside."""


@dataclass(frozen=True)
class ExpertOptimizer:
    """What an optimizer keeps of every expert parameter.

    Attributes:
        num_state_tensors: fp32 tensors of the parameter's size: 2 with Adam (both moments), 1 with
            momentum, 0 with plain SGD.
        has_master_weights: Whether an fp32 copy of the parameter is kept, as for half-precision models.
        is_distributed: Whether all that is divided over the expert-data-parallel ranks.
    """

    num_state_tensors: int = 2
    has_master_weights: bool = False
    is_distributed: bool = False

    def __post_init__(self) -> None:
        if self.num_state_tensors < 0:
            raise ValueError(f"num_state_tensors is {self.num_state_tensors}: wanted 0 or more")

    @property
    def bytes_per_element(self) -> int:
        """Bytes for each element of a parameter, on all ranks that share it together."""
        return FP32_BYTES * (self.num_state_tensors + self.has_master_weights)

    def owned_bytes(self, num_elements: int, dtype_bytes: int, num_copies: int) -> int:
        """What moves with an expert when its owner changes: parameters, masters and optimizer states.

        Args:
            num_elements: Of the expert.
            dtype_bytes: Of a parameter's element.
            num_copies: Groups with copies of the same owners; they share what is divided over them.
        """
        states = optimizer_state_bytes(num_elements, self, expert_data_parallel_size=num_copies)
        return num_elements * dtype_bytes + states


@dataclass(frozen=True)
class ExpertMemory:
    """Bytes of one rank's experts; the last five are most that may be there at once.

    Attributes:
        slot_parameters_bytes: Parameters of the owned experts.
        slot_gradients_bytes: Their ``main_grad``.
        optimizer_bytes: Their optimizer state and fp32 master weights.
        replica_parameters_bytes: Parameters of replicas.
        replica_gradients_bytes: Gradients of replicas.
        replica_optimizer_bytes: Optimizer state and fp32 master weights of lasting replicas.
        packed_experts_bytes: Copies of experts or of their gradients, made to be sent.
        reduction_buffers_bytes: Gradients of replicas that have come in from elsewhere, and their sums.
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
        """What transfers need beside the replicas themselves."""
        return self.packed_experts_bytes + self.reduction_buffers_bytes

    @property
    def expert_parallelism_bytes(self) -> int:
        """What plain expert parallelism takes: the slots, and their optimizer."""
        return self.slot_parameters_bytes + self.slot_gradients_bytes + self.optimizer_bytes

    @property
    def above_expert_parallelism_bytes(self) -> int:
        """What replicas cost."""
        return (
            self.replica_parameters_bytes
            + self.replica_gradients_bytes
            + self.replica_optimizer_bytes
            + self.transfer_buffers_bytes
        )

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.expert_parallelism_bytes + self.above_expert_parallelism_bytes

    def describe(self) -> str:
        """One line for the log."""
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
    chunk_bytes: int | None = None,
) -> ExpertMemory:
    """Bytes of one rank's experts: the sum of this module's other functions.

    Args:
        held: When replicas are there, and of how many layers.
        slots_per_device: Experts a device owns over all of them, S.
        replicas_per_layer: Most replicas a device holds of one layer, m.
        owned_per_layer: Most experts of one layer a device owns: E/D under Megatron's even map.
        expert_elements: Elements of one expert's parameters.
        dtype_bytes: Bytes of an element of the parameters.
        gradient_bytes: Bytes of an element of ``main_grad``.
        optimizer: What the optimizer keeps.
        expert_data_parallel_size: Ranks that share a distributed optimizer.
        chunk_bytes: Size of a message; None for whole experts.
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
    lasts = held.life is ReplicaLife.LASTING
    # Nothing is sent where nothing is replicated.
    sent_per_layer = owned_per_layer if replicas_per_layer else 0
    spare_elements = held.num_layers * replicas_per_layer * expert_elements if lasts else 0
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
        + spare_elements * gradient_bytes,
        replica_optimizer_bytes=optimizer_state_bytes(
            spare_elements, optimizer, expert_data_parallel_size=expert_data_parallel_size
        ),
        packed_experts_bytes=packed_experts_bytes(
            sent_per_layer, replicas_per_layer, expert_bytes, sum_bytes=sum_bytes, held=held
        ),
        reduction_buffers_bytes=reduction_buffers_bytes(
            sent_per_layer,
            replicas_per_layer,
            gradient_bytes=sum_bytes if held.sums_gradients or lasts else expert_bytes,
            sum_bytes=sum_bytes,
            chunk_bytes=chunk_bytes,
        ),
    )


def optimizer_state_bytes(
    num_elements: int, optimizer: ExpertOptimizer, *, expert_data_parallel_size: int
) -> int:
    """Optimizer states and master weights of a rank's owned experts.

    The distributed optimizer gives every expert-data-parallel rank an equal part of the elements,
    rounded up here; its padding is not counted.
    """
    parts = expert_data_parallel_size if optimizer.is_distributed else 1
    return -(-num_elements // parts) * optimizer.bytes_per_element


def replica_parameters_bytes(replicas_per_layer: int, expert_bytes: int, held: HeldReplicas) -> int:
    """Parameters of replicas, of all layers and micro-batches that have them at once."""
    return held.layers_with_weights * replicas_per_layer * expert_bytes


def replica_gradients_bytes(
    replicas_per_layer: int, expert_bytes: int, *, accumulator_bytes: int, held: HeldReplicas
) -> int:
    """Gradients of replicas: one layer's as autograd makes them, and sums over micro-batches if any.

    The sums wait for the last micro-batch, of all layers and in fp32. Where gradients go home with every
    micro-batch there are none.

    Args:
        replicas_per_layer: Most replicas a device holds of one layer, m.
        expert_bytes: One expert's gradient in the parameters' dtype.
        accumulator_bytes: One expert's sum over micro-batches.
        held: When replicas are there, and of how many layers.
    """
    made_bytes = min(held.num_layers, 1) * replicas_per_layer * expert_bytes
    return made_bytes + held.layers_with_sums * replicas_per_layer * accumulator_bytes


def packed_experts_bytes(
    sent_per_layer: int, replicas_per_layer: int, expert_bytes: int, *, sum_bytes: int, held: HeldReplicas
) -> int:
    """Flat copies to be sent: of one layer's experts, and of the gradients of its replicas.

    Sums over micro-batches are flat and sent as they are.

    Args:
        sent_per_layer: Owned experts of one layer with replicas elsewhere.
        replicas_per_layer: Most replicas a device holds of one layer, m.
        expert_bytes: One expert in the parameters' dtype.
        sum_bytes: One expert's gradient in fp32.
        held: When replicas are there, and of how many layers.
    """
    if held.life is ReplicaLife.LASTING:
        # Gradients of one layer's holders on their way home, and another one's sums on their way back.
        return 2 * (sent_per_layer + replicas_per_layer) * sum_bytes
    all_summed = held.sums_gradients and held.life is not ReplicaLife.CHOSEN
    gradients = 0 if all_summed else min(held.num_layers, 1) * replicas_per_layer
    # A layer's experts are gathered anew while gradients of the layer above it are on their way.
    at_once = held.life is ReplicaLife.LAYER_PASS and held.num_layers > 1
    copies = sent_per_layer + gradients if at_once else max(sent_per_layer, gradients)
    return copies * expert_bytes


def reduction_buffers_bytes(
    sent_per_layer: int,
    replicas_per_layer: int,
    *,
    gradient_bytes: int,
    sum_bytes: int,
    chunk_bytes: int | None,
) -> int:
    """What one layer's gradients take on their way: messages, and the sums that end here.

    A message comes from every child of every expert, owned or a replica that is passed on.

    Args:
        sent_per_layer: Owned experts of one layer with replicas elsewhere.
        replicas_per_layer: Most replicas a device holds of one layer, m.
        gradient_bytes: One expert's gradient on its way.
        sum_bytes: One expert's sum at its owner.
        chunk_bytes: Size of a message; None for whole experts.
    """
    message_bytes = gradient_bytes if chunk_bytes is None else min(chunk_bytes, gradient_bytes)
    messages_bytes = (sent_per_layer + replicas_per_layer) * MAX_CHILDREN * message_bytes
    return messages_bytes + sent_per_layer * sum_bytes


def _readable(num_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves 1 or more."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 0:
            raise ValueError(f"{name} is {value}: wanted 0 or more")


def _check_positive(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: wanted 1 or more")
