"""Bytes that the experts of one rank take, and how many replicas fit (Hecate, §4.2).

Counted is what lives longer than one kernel: parameters, gradients, optimizer states and transfers of the
experts of one pipeline stage. Activations are not, nor what Megatron adds: a gradient of an owned expert on
its way into ``main_grad``, and padding. Matrix products are assumed to add replicas' gradients to the sums;
where autograd does, gradients of :data:`ADDED_BYTES` and one more tensor can wait for it. Gradient sums over
micro-batches are in fp32. ``messages`` is the rule by which transfers divide an expert.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import cycle, islice

from megatron_fssdp.planning.replica_life import PipelineStage, ReplicaLife
from megatron_fssdp.planning.transfer.message_size import MessageRule

FP32_BYTES = 4
"""Bytes of one fp32 element: of optimizer states, master weights and gradient sums."""

ADDED_BYTES = 64 << 20
"""Bytes of gradients that wait to be added to the sums together: more would save no time."""

MAX_CHILDREN = 3
"""Most devices to which one device sends an expert in a two-level transfer: a leader and two in its node."""

RESERVE_FRACTION = 0.2
"""Part of the free memory that replicas do not use; ours, because the paper gives none.

It is for fragmentation, transfers of owned experts, and iterations that need more than the profiled one.
"""


@dataclass(frozen=True)
class HeldReplicas:
    """How long a rank holds replicas, of which layers of its pipeline stage, and of which size.

    Attributes:
        expert_elements: Parameters of an expert, of ``dtype_bytes`` bytes each.
        num_micro_batches: Number of micro-batches in an iteration, the largest that is still to come.
        copy_bytes: Bytes of an element's quantized copies (fp8, fp4).
        trained_share: Part of the parameters that have gradients; less than 1 with adapters (LoRA).
    """

    life: ReplicaLife
    stage: PipelineStage
    expert_elements: int
    dtype_bytes: int
    num_micro_batches: int = 1
    copy_bytes: float = 0.0
    trained_share: float = 1.0

    def for_at_least(self, num_micro_batches: int) -> "HeldReplicas":
        """The same, if an iteration has so many micro-batches or more."""
        return replace(self, num_micro_batches=max(self.num_micro_batches, num_micro_batches))

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's parameters."""
        return self.expert_elements * self.dtype_bytes

    @property
    def trained_elements(self) -> int:
        """Parameters of an expert that have gradients."""
        return round(self.expert_elements * self.trained_share)

    @property
    def sum_bytes(self) -> int:
        """Bytes of the fp32 sum of an expert's gradients."""
        return self.trained_elements * FP32_BYTES

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of an expert as a backward pass computes them."""
        return self.trained_elements * self.dtype_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes of the gradients of an expert as they are sent."""
        return self.sum_bytes if self.sends_fp32 else self.gradient_bytes

    @property
    def sends_fp32(self) -> bool:
        """Whether gradients are sent in fp32: sums over micro-batches, and those of resident replicas."""
        return self.life.sums_gradients(self.num_micro_batches) or self.life is ReplicaLife.RESIDENT

    @property
    def layers_with_weights(self) -> int:
        """Most layers whose replicas' weights are there at once; with recomputation, an upper bound."""
        if self.life is ReplicaLife.LAYER_PASS:
            return min(self.stage.num_layers, 1)
        # Of the lives that ``auto`` selects from, a micro-batch needs most memory.
        if self.life in (ReplicaLife.MICRO_BATCH, ReplicaLife.SELECTED):
            return self.stage.layers_in_flight(self.num_micro_batches)
        return self.stage.num_layers

    @property
    def layers_with_copies(self) -> int:
        """Most layers with quantized copies at once: those of their weights, or one for each pass in flight.

        Transformer Engine saves copies for the backward pass, also if the weights are released in between.
        """
        if self.life is ReplicaLife.LAYER_PASS:
            return self.stage.layers_in_flight(self.num_micro_batches)
        return self.layers_with_weights

    @property
    def layers_with_sums(self) -> int:
        """Number of layers whose replicas' gradients are kept in extra sums until the last micro-batch."""
        # Resident replicas need no extra sums, because they sum gradients in their main_grad.
        return self.stage.num_layers if self.sends_fp32 and self.life is not ReplicaLife.RESIDENT else 0

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights that one replica of each layer has, with their quantized copies."""
        copy_bytes = self.layers_with_copies * self.copy_bytes
        return int(self.expert_elements * (self.layers_with_weights * self.dtype_bytes + copy_bytes))

    @property
    def sums_bytes(self) -> int:
        """Bytes of the gradient sums of one replica of each layer: of one layer, or of all."""
        if self.life is ReplicaLife.RESIDENT:
            return 0  # They are in its main_grad.
        if self.layers_with_sums:
            return self.layers_with_sums * self.sum_bytes
        # More backward passes than announced may follow, so only lives of one pass have sums in its type.
        may_sum = self.life in (ReplicaLife.ITERATION, ReplicaLife.SELECTED)
        return min(self.stage.num_layers, 1) * (self.sum_bytes if may_sum else self.gradient_bytes)

    def buffers_bytes(self, received: int, experts: int, messages: MessageRule | None) -> int:
        """Bytes of received gradients of replicas, and of the fp32 sums of the experts to which they belong.

        The sums are in the memory of the gradients if those are in fp32. Nothing without ``messages``.
        """
        if messages is None or not received:
            return 0
        if self.sends_fp32:
            return messages.buffered_bytes(self.sum_bytes, received)
        wide_bytes = messages.buffered_bytes(self.gradient_bytes, min(received, experts))
        wide_bytes = wide_bytes * FP32_BYTES // self.dtype_bytes
        return messages.buffered_bytes(self.gradient_bytes, received) + wide_bytes

    def bytes_at_peak(self, replicas_L: Sequence[int]) -> int:
        """Bytes of a device's replicas of each layer at the peak of an iteration, without buffers."""
        most_first = sorted(replicas_L, reverse=True)
        num_bytes: float = sum(most_first[: self.layers_with_weights]) * self.dtype_bytes
        num_bytes += sum(most_first[: self.layers_with_sums]) * FP32_BYTES * self.trained_share
        copies = sum(islice(cycle(most_first), self.layers_with_copies))  # of several micro-batches
        return int(self.expert_elements * (num_bytes + copies * self.copy_bytes))


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

    def owned_bytes(self, expert_bytes: int, trained_elements: int, num_copies: int) -> int:
        """Bytes that move with an owned expert: parameters, masters, optimizer states."""
        return expert_bytes + self.state_bytes(trained_elements, num_copies)


@dataclass(frozen=True)
class ExpertMemory:
    """Bytes of one rank's owned experts and replicas: parameters, ``main_grad`` and optimizer.

    The last four numbers are upper bounds; only resident replicas have an optimizer. Buffers are for received
    gradients, and for flat copies of resident replicas.
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
    replicas: Mapping[ReplicaLife, int],
    owned_per_layer: int,
    gradient_bytes: int,
    optimizer: ExpertOptimizer,
    expert_data_parallel_size: int,
    messages: MessageRule,
    most_received: int | None = None,
) -> ExpertMemory:
    """Bytes of the experts of one rank.

    A device owns ``slots_per_device`` experts in all layers of its pipeline stage, and at most
    ``owned_per_layer`` of one layer: E/D under Megatron's even map. It holds at most so many ``replicas`` of
    one layer, m, of each life; ``held.life`` does not count. An element of ``main_grad`` has
    ``gradient_bytes``. It receives gradients of ``most_received`` replicas of one layer, by default the most
    that is possible: of each expert that it has, those of all children in the tree.
    """
    elements, expert_bytes = held.trained_elements, held.expert_bytes
    resident = held.stage.num_layers * replicas.get(ReplicaLife.RESIDENT, 0)
    weights_bytes, gradients_bytes, buffers_bytes = 0, resident * elements * gradient_bytes, 0
    for life, number in replicas.items():
        of_life = replace(held, life=life)
        weights_bytes += number * of_life.weights_bytes
        gradients_bytes += number * of_life.sums_bytes
        # A device sends no experts if there are no replicas.
        sent = owned_per_layer if number else 0
        received = MAX_CHILDREN * (sent + number) if most_received is None else most_received
        received_bytes = of_life.buffers_bytes(received, sent + number, messages)
        if life is ReplicaLife.RESIDENT:
            # One layer's holders send gradients to the owners while another layer's owners send sums back.
            received_bytes += 2 * (sent + number) * held.sum_bytes
        elif not of_life.sends_fp32 and life in (ReplicaLife.ITERATION, ReplicaLife.SELECTED):
            received_bytes += messages.buffered_bytes(held.gradient_bytes, number)  # rounded to travel
        buffers_bytes = max(buffers_bytes, received_bytes)
    return ExpertMemory(
        slot_parameters_bytes=slots_per_device * expert_bytes,
        slot_gradients_bytes=slots_per_device * elements * gradient_bytes,
        optimizer_bytes=optimizer.state_bytes(slots_per_device * elements, expert_data_parallel_size),
        replica_parameters_bytes=weights_bytes,
        replica_gradients_bytes=gradients_bytes,
        replica_optimizer_bytes=optimizer.state_bytes(resident * elements, expert_data_parallel_size),
        transfer_buffers_bytes=buffers_bytes,
    )


def memory_capacity(
    free_bytes: int,
    held: HeldReplicas,
    *,
    num_experts: int,
    owned_per_layer: int,
    messages: MessageRule | None,
) -> tuple[int, tuple[int, int, int]]:
    """Number of replicas that a device can hold for one layer, m (Hecate, §4.2), from 0 to ``num_experts``.

    The second result is for strategies that decide about the life of each layer's replicas (ours): how many
    a layer can keep for the iteration, hold for a pass, and hold for each micro-batch in flight. All fit
    together, whatever the layers decide. Layers with passes share one part of the memory. It has room for
    ``owned_per_layer`` replicas at least, those of a device with a high load, or else layers keep fewer.

    This is not for resident replicas. All ranks must plan with the lowest numbers of any. ``free_bytes`` are
    free at the peak of an iteration without replicas. Without ``messages``, no buffers are counted for the
    gradients that a replica's device passes on.
    """
    usable_bytes = max(free_bytes - int(free_bytes * RESERVE_FRACTION), 0)
    in_pass, num_layers = replace(held, life=ReplicaLife.LAYER_PASS), held.stage.num_layers

    def buffers_bytes(replicas: HeldReplicas, slots: int) -> int:
        return replicas.buffers_bytes(MAX_CHILDREN * slots, slots, messages)

    def fitting(replicas: HeldReplicas, most_bytes: int) -> int:
        slot_bytes = replicas.weights_bytes + replicas.sums_bytes
        # Buffers grow with the slots up to a bound.
        few = most_bytes // (slot_bytes + buffers_bytes(replicas, 1))
        many = (most_bytes - buffers_bytes(replicas, num_experts)) // slot_bytes
        return min(max(few, many, 0), num_experts)

    # A layer with passes keeps nothing. So where there is one, passes get what all others leave.
    others_bytes = held.weights_bytes - held.weights_bytes // num_layers + held.sums_bytes
    if held.layers_with_sums:
        others_bytes -= held.sums_bytes // num_layers

    def passes_beside(kept: int) -> int:
        return fitting(in_pass, usable_bytes - kept * others_bytes - buffers_bytes(held, kept))

    most = kept = fitting(held, usable_bytes)
    while kept and passes_beside(kept) < owned_per_layer:
        kept -= 1
    # A layer with replicas of micro-batches has no sums, which need no less than the weights.
    in_flight = kept * num_layers // max(held.stage.layers_in_flight(held.num_micro_batches), num_layers)
    return most, (kept, passes_beside(kept), in_flight)


def _readable(num_bytes: int) -> str:
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{num_bytes / 1024**power:.{1 if power else 0}f} {unit}"
