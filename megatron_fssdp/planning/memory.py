"""Bytes that the experts of one rank take, and how many replicas fit (Hecate, §4.2).

Counted is what lives longer than one kernel: parameters, gradients, optimizer states and transfers of the
experts of one pipeline stage. Activations are not, nor what Megatron adds: a gradient of an owned expert on
its way into ``main_grad``, and padding. Matrix products are assumed to add replicas' gradients to the sums;
where autograd does, gradients of :data:`ADDED_BYTES` and one more tensor can wait for it. Everywhere,
``held`` says how long the device holds replicas, and of which layers. An expert has ``expert_elements``
parameters of ``dtype_bytes`` bytes each. Gradient sums over micro-batches are in fp32. ``messages`` is the
rule by which transfers divide an expert.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import cycle, islice

from megatron_fssdp.planning.replica_life import HeldReplicas, ReplicaLife
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
    expert_elements: int,
    dtype_bytes: int,
    gradient_bytes: int,
    optimizer: ExpertOptimizer,
    expert_data_parallel_size: int,
    messages: MessageRule,
    most_received: int | None = None,
) -> ExpertMemory:
    """Bytes of the experts of one rank; the module's text explains the other arguments.

    A device owns ``slots_per_device`` experts in all layers of its pipeline stage, and at most
    ``owned_per_layer`` of one layer: E/D under Megatron's even map. It holds at most so many ``replicas`` of
    one layer, m, of each life; ``held.life`` does not count. An element of ``main_grad`` has
    ``gradient_bytes``. It receives gradients of ``most_received`` replicas of one layer, by default the most
    that is possible: of each expert that it has, those of all children in the tree.
    """
    expert_bytes, sum_bytes = expert_elements * dtype_bytes, expert_elements * FP32_BYTES
    resident = held.stage.num_layers * replicas.get(ReplicaLife.RESIDENT, 0)
    weights_bytes, gradients_bytes, buffers_bytes = 0, resident * expert_elements * gradient_bytes, 0
    for life, number in replicas.items():
        one = replace(held, life=life)
        weights_bytes += number * _weights_bytes(one, expert_elements, dtype_bytes)
        gradients_bytes += number * _sums_bytes(one, expert_bytes, sum_bytes)
        # A device sends no experts if there are no replicas.
        sent = owned_per_layer if number else 0
        received = MAX_CHILDREN * (sent + number) if most_received is None else most_received
        received_bytes = _buffers_bytes(one, received, sent + number, expert_bytes, sum_bytes, messages)
        if life is ReplicaLife.RESIDENT:
            # One layer's holders send gradients to the owners while another layer's owners send sums back.
            received_bytes += 2 * (sent + number) * sum_bytes
        elif not one.sends_fp32 and one.life in (ReplicaLife.ITERATION, ReplicaLife.SELECTED):
            received_bytes += messages.buffered_bytes(expert_bytes, number)  # rounded to travel
        buffers_bytes = max(buffers_bytes, received_bytes)
    return ExpertMemory(
        slot_parameters_bytes=slots_per_device * expert_bytes,
        slot_gradients_bytes=slots_per_device * expert_elements * gradient_bytes,
        optimizer_bytes=optimizer.state_bytes(slots_per_device * expert_elements, expert_data_parallel_size),
        replica_parameters_bytes=weights_bytes,
        replica_gradients_bytes=gradients_bytes,
        replica_optimizer_bytes=optimizer.state_bytes(resident * expert_elements, expert_data_parallel_size),
        transfer_buffers_bytes=buffers_bytes,
    )


def memory_capacity(
    free_bytes: int,
    held: HeldReplicas,
    *,
    expert_elements: int,
    dtype_bytes: int,
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
    expert_bytes, sum_bytes = expert_elements * dtype_bytes, expert_elements * FP32_BYTES
    usable_bytes = max(free_bytes - int(free_bytes * RESERVE_FRACTION), 0)
    in_pass, num_layers = replace(held, life=ReplicaLife.LAYER_PASS), held.stage.num_layers

    def buffers_bytes(one: HeldReplicas, slots: int) -> int:
        if messages is None or not slots:
            return 0
        return _buffers_bytes(one, MAX_CHILDREN * slots, slots, expert_bytes, sum_bytes, messages)

    def fitting(one: HeldReplicas, most_bytes: int) -> int:
        slot_bytes = _weights_bytes(one, expert_elements, dtype_bytes)
        slot_bytes += _sums_bytes(one, expert_bytes, sum_bytes)
        # Buffers grow with the slots up to a bound.
        few = most_bytes // (slot_bytes + buffers_bytes(one, 1))
        many = (most_bytes - buffers_bytes(one, num_experts)) // slot_bytes
        return min(max(few, many, 0), num_experts)

    # A layer with passes keeps nothing. So where there is one, passes get what all others leave.
    weights_bytes = _weights_bytes(held, expert_elements, dtype_bytes)
    sums_bytes = _sums_bytes(held, expert_bytes, sum_bytes)
    others_bytes = weights_bytes - weights_bytes // num_layers + sums_bytes
    if held.layers_with_sums:
        others_bytes -= sums_bytes // num_layers

    def passes_beside(kept: int) -> int:
        return fitting(in_pass, usable_bytes - kept * others_bytes - buffers_bytes(held, kept))

    most = kept = fitting(held, usable_bytes)
    while kept and passes_beside(kept) < owned_per_layer:
        kept -= 1
    # A layer with replicas of micro-batches has no sums, which need no less than the weights.
    each = kept * num_layers // max(held.stage.layers_in_flight(held.num_micro_batches), num_layers)
    return most, (kept, passes_beside(kept), each)


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


def _sums_bytes(held: HeldReplicas, expert_bytes: int, sum_bytes: int) -> int:
    """Bytes of the gradient sums of one replica of each layer: of one layer, or of all."""
    if held.life is ReplicaLife.RESIDENT:
        return 0  # They are in its main_grad.
    if held.layers_with_sums:
        return held.layers_with_sums * sum_bytes
    # More backward passes than announced may follow, so only lives of one pass have sums in its data type.
    may_sum = held.life in (ReplicaLife.ITERATION, ReplicaLife.SELECTED)
    return min(held.stage.num_layers, 1) * (sum_bytes if may_sum else expert_bytes)


def _buffers_bytes(
    held: HeldReplicas, received: int, experts: int, expert_bytes: int, sum_bytes: int, messages: MessageRule
) -> int:
    """Bytes of received gradients of replicas, and of the fp32 sums of the experts to which they belong.

    The sums are in the memory of the gradients if those are in fp32.
    """
    if held.sends_fp32:
        return messages.buffered_bytes(sum_bytes, received)
    wide_bytes = messages.buffered_bytes(expert_bytes, min(received, experts)) * sum_bytes // expert_bytes
    return messages.buffered_bytes(expert_bytes, received) + wide_bytes


def _readable(num_bytes: int) -> str:
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{num_bytes / 1024**power:.{1 if power else 0}f} {unit}"
