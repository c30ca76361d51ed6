"""The transfers of one plan: weights into the replica slots, and the gradients of the replicas home.

Weights pass through these states. Re-materialization (Hecate §4.2) goes around the circle twice in each
micro-batch; otherwise the weights stay until the iteration, or the micro-batch, is over::

              gather                    await_weights               gather: take memory, start SparseAllGather
    OWNED ───────────────► GATHERING ───────────────► PRESENT       await_weights: all elements have arrived
      ▲                                                  │          release: give the memory back
      └───────────────────── release ────────────────────┘

Gradients go home once in an iteration, or with every backward pass under re-materialization and for replicas
of one micro-batch. The sums of a backward pass stay open until they have reached the owners.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.sparse.transfer_cargo import accumulation_dtype
from megatron_fssdp.collectives.trace_names import traced
from megatron_fssdp.collectives.transfer_lanes import PendingTransfer
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan
from megatron_fssdp.runtime.experts.expert_layout import LocalExperts
from megatron_fssdp.runtime.slots.replica_slots import ReplicaSlots
from megatron_fssdp.strategies.layer_plan import LayerPlan


class ReplicaTransfers:
    """Weights and gradients of the replicas of one plan. All ranks of the group make the same calls in order.

    ``slots`` hold the experts of ``plan``, and ``bind`` is ``PlannedLayer.bind``. If transfers are split
    (``splits``), a part of the weights travels beside the experts of the layer before. ``waiting`` returns a
    context manager that is entered around waits for transfers.
    """

    def __init__(
        self,
        plan: LayerPlan,
        slots: ReplicaSlots,
        experts: LocalExperts,
        bind: Callable[[TransferPlan, int, torch.dtype], SparseTransfer],
        *,
        splits: bool = False,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.plan, self.slots = plan, slots
        self._experts, self._bind, self._splits, self._waiting = experts, bind, splits, waiting
        self._each_pass = plan.rematerialize
        self._bound: dict[int, SparseTransfer] = {}
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._prefetched = {False: False, True: False}
        self._num_users = self._num_gathered = 0
        self._sent: Mapping[int, torch.Tensor] = {}
        self._gathering: list[PendingTransfer] = []
        self._reducing: PendingTransfer | None = None

    # Weights.

    def prefetch(self, *, backward: bool) -> None:
        """Gather the weights for the next forward or backward pass, while other compute hides it."""
        if self._each_pass and not self._prefetched[backward]:
            self._prefetched[backward] = True
            self._num_users += 1
        self.gather()

    def begin_use(self, *, backward: bool) -> None:
        """Begin to use the weights in a forward or backward pass; they may still be on their way."""
        if not self._prefetched[backward]:
            self._num_users += 1
        self._prefetched[backward] = False
        self.gather()

    def end_use(self) -> None:
        """End a use. Under re-materialization, the memory is given back after the last one."""
        self._num_users -= 1
        if self._each_pass and not self._num_users:
            self.release()

    @property
    def is_gathered(self) -> bool:
        """Whether all elements of the weights have been sent for."""
        return self._num_gathered == self.slots.layout.numel

    def gather_first_part(self) -> None:
        """If transfers are split, start the part that runs beside the experts of the layer before."""
        if self._splits and not self._num_gathered:
            numel = self.slots.layout.numel  # At least one element is left for the other part.
            if part := min(round(self.plan.early * numel), numel - 1):
                self._gather(part)

    def gather(self) -> None:
        """Start to gather all weights whose transfer has not been started."""
        if not self.is_gathered:
            self._gather(self.slots.layout.numel - self._num_gathered)

    def await_weights(self) -> None:
        """Wait until all weights have arrived."""
        self.gather()
        self._settle_gathers()

    def release(self) -> None:
        """Give back the memory of the weights, after a wait for the transfers that use it."""
        self._settle_gathers()
        self._num_gathered = 0
        self.slots.close_weights()

    def complete(self, addition: TransferPlan) -> None:
        """Gather the replicas that a corrected plan adds, and wait; those that are here may be sources."""
        self._gather(self.slots.layout.numel, addition)
        self._settle_gathers()

    def _transfer(self, num_elements: int) -> SparseTransfer:
        """The plan's transfer of so many elements; weights and gradients share it."""
        if num_elements not in self._bound:
            dtype = self.slots.layout.dtype
            self._bound[num_elements] = self._bind(self.plan.transfer, num_elements, dtype)
        return self._bound[num_elements]

    @traced("gather weights")
    @torch.inference_mode(False)  # The lane's thread writes into the memory that is taken here.
    def _gather(self, num_elements: int, plan: TransferPlan | None = None) -> None:
        self._experts.await_parameters()  # Usually, the layer has done it before.
        layout, owned = self.slots.layout, self._experts.parameters
        transfer = (
            self._transfer(num_elements) if plan is None else self._bind(plan, num_elements, layout.dtype)
        )
        self.slots.open_weights()
        held, packed = self.slots.weights(), dict[int, torch.Tensor]()
        begin, self._num_gathered = self._num_gathered, self._num_gathered + num_elements
        if not begin:
            packed = self._new([one for one in transfer.shared_experts if one in owned], layout.dtype)
            self._sent = {e: packed[e] if e in packed else held[e] for e in transfer.shared_experts}

        def pack() -> None:
            for expert, flat in packed.items():
                layout.pack([parameter.detach() for parameter in owned[expert]], out=flat)

        sent, out = self._sent, {expert: held[expert] for expert in transfer.received_experts}
        if num_elements < layout.numel:
            part = slice(begin, self._num_gathered)
            sent, out = ({e: flat[part] for e, flat in flats.items()} for flats in (sent, out))
        self._gathering.append(transfer.start_all_gather(sent, out=out, fill=pack))

    def _new(self, experts: Iterable[int], dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """A flat tensor without contents for each expert."""
        numel, device = self.slots.layout.numel, self.slots.device
        return {expert: torch.empty(numel, dtype=dtype, device=device) for expert in experts}

    def _settle_gathers(self) -> None:
        if not self._gathering:
            return
        with self._waiting():
            for pending in self._gathering:
                pending.wait()
        self._gathering.clear()
        if self.is_gathered:
            self._sent = {}

    # Gradients.

    def open_sums(self) -> None:
        """Provide the memory to which the backward pass of the experts adds the replicas' gradients."""
        self.settle()
        self.slots.open_sums()

    @traced("reduce gradients")
    def reduce(self, dtype: torch.dtype) -> None:
        """Start SparseReduceScatter of the present sums; they travel in ``dtype``, equal on all ranks."""
        self.settle()
        self.slots.open_sums()  # A replica may have had no rows.
        layout = self.slots.layout
        # The owners add in fp32 in any case.
        wide = accumulation_dtype(layout.dtype)
        own = self.slots.sums()
        if any(total.dtype is not dtype for total in own.values()):
            own = {expert: total.to(dtype) for expert, total in own.items()}
        transfer = self._transfer(layout.numel)
        # The owner's own part is already in its gradient, so it is not a part of these sums. Nothing else is
        # added to its gradient before settle(), so the lane adds them, beside the backward pass.
        home, owned = self._new(transfer.shared_experts, wide), self._experts.parameters
        self._experts.await_gradients()
        gradients = [gradient_to_fill(parameter) for expert in home for parameter in owned[expert]]

        def add() -> None:
            add_to(gradients, [part for total in home.values() for part in layout.unpack(total)])

        self._reducing = transfer.start_reduce_scatter(own, dtype=dtype, out=home, then=add)

    def settle(self) -> None:
        """Wait until the gradients on their way are in the owners', and give back the sums' memory."""
        if self._reducing is None:
            return
        with self._waiting():
            self._reducing.wait()
        self._reducing = None
        self.slots.close_sums()

    def drop(self) -> None:
        """Give up weights and gradients, after a wait for the transfers that use their memory."""
        for pending in self._gathering:
            pending.wait()
        if self._reducing is not None:
            self._reducing.wait()
        self._begin_anew()
        self.slots.close_weights()
        self.slots.close_sums()


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """``main_grad`` of a Parameter, or ``grad`` without Megatron's DDP; ``None`` if it has no gradient."""
    main_grad = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def gradient_to_fill(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The gradient of a Parameter, which becomes zeros if there is none; ``None`` if it is frozen."""
    if not parameter.requires_grad:
        return None
    if gradient_of(parameter) is None:
        parameter.grad = torch.zeros_like(parameter)
    return gradient_of(parameter)


def add_to(gradients: Sequence[torch.Tensor | None], sums: Sequence[torch.Tensor]) -> None:
    """Add sums of raw gradients of experts to the gradients of their Parameters, except frozen ones."""
    pairs = [(gradient, one) for gradient, one in zip(gradients, sums, strict=True) if gradient is not None]
    if pairs:
        so_far, added = zip(*pairs, strict=True)
        torch._foreach_add_(so_far, added)
