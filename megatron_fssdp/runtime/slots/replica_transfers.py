"""The transfers of one plan: weights into the replica slots, and the gradients of the replicas home.

Weights and sums of gradients each go around a circle. Under re-materialization (Hecate §4.2), weights do so
twice in each micro-batch; otherwise they stay until the iteration, or the micro-batch, is over. Sums go home
once in an iteration, or with every backward pass under re-materialization and for replicas of one
micro-batch::

             gather                    settle_gathers              gather: take memory, start SparseAllGather
    owned ──────────────► on their way ──────────────► present     settle_gathers: all elements have arrived
      ▲                                                   │        release: give the memory back
      └────────────────────── release ────────────────────┘

             open_sums            reduce                           open_sums: take memory, with zeros
    closed ─────────────► open ─────────────► on their way         reduce: start SparseReduceScatter
      ▲                                            │               settle: sums are in the owners' gradients
      └─────────────────── settle ─────────────────┘
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from megatron_fssdp.collectives.sparse.peer_memory import NO_PUTS
from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.trace_names import traced
from megatron_fssdp.collectives.transfer_lanes import PendingTransfer
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan
from megatron_fssdp.runtime.experts.expert_layout import LocalExperts
from megatron_fssdp.runtime.slots.gradient_totals import GradientTotals
from megatron_fssdp.runtime.slots.replica_slots import ReplicaSlots
from megatron_fssdp.strategies.layer_plan import LayerPlan


class ReplicaTransfers:
    """Weights and gradients of the replicas of one plan. All ranks of the group make the same calls in order.

    ``slots`` hold the experts of ``plan``, and ``bind`` is ``LocalLayer.bind``. ``waiting`` returns a context
    manager that is entered around waits for transfers.
    """

    def __init__(
        self,
        plan: LayerPlan,
        slots: ReplicaSlots,
        experts: LocalExperts,
        bind: Callable[[TransferPlan, Sequence[int], torch.dtype, range], SparseTransfer],
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.plan, self.slots = plan, slots
        self._experts, self._bind, self._waiting = experts, bind, waiting
        self._each_pass = plan.rematerialize
        self._bound: dict[object, SparseTransfer] = {}
        self._puts = slots.room.puts(plan.placement) if slots.room else NO_PUTS
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._prefetched = {False: False, True: False}
        self._num_users = self._num_gathered = 0
        self._gathering: list[PendingTransfer] = []
        self._reducing: PendingTransfer | None = None
        self._totals: list[GradientTotals] = []
        self._addition: TransferPlan | None = None

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
        if self.slots.room is not None:
            self.slots.room.note_reader()
        self._num_users -= 1
        if self._each_pass and not self._num_users:
            self.release()

    @property
    def is_gathered(self) -> bool:
        """Whether all elements of the weights have been sent for."""
        return self._num_gathered == self.slots.layout.numel

    def gather_first_part(self) -> None:
        """Start the part that runs beside the experts of the layer before."""
        if not self._num_gathered:
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
        self.settle_gathers()

    def release(self) -> None:
        """Give back the memory of the weights, after a wait for the transfers that use it."""
        self.settle_gathers()
        self._num_gathered, self._addition = 0, None
        self.slots.close_weights()

    def add(self, addition: TransferPlan) -> None:
        """Let the next gather bring only what a corrected plan adds; replicas here may be sources."""
        self._addition = addition

    def give_way(self) -> None:
        """Release prefetched weights, which come again before their use, for another layer's.

        Raises:
            RuntimeError: They are in use.
        """
        if self._num_users > sum(self._prefetched.values()):
            raise RuntimeError(
                f"{self._experts.name}: got passes of two layers at the same time, wanted one after the "
                "other for slots that layers share; unset FSSDP_PEER_PUTS"
            )
        self.release()

    def _transfer(self, sizes: Sequence[int], elements: range) -> SparseTransfer:
        """The plan's transfer of some elements of each expert, which consists of tensors of these sizes."""
        key = len(sizes), elements
        if key not in self._bound:
            dtype = self.slots.layout.dtype
            self._bound[key] = self._bind(self.plan.transfer, sizes, dtype, elements)
        return self._bound[key]

    @traced("gather weights")
    @torch.inference_mode(False)  # The lane's thread writes into the memory that is taken here.
    def _gather(self, num_elements: int) -> None:
        self._experts.await_parameters()  # Usually, the layer has done it before.
        layout, owned = self.slots.layout, self._experts.parameters
        begin, self._num_gathered = self._num_gathered, self._num_gathered + num_elements
        elements = range(begin, self._num_gathered)
        if self._addition is None:
            transfer = self._transfer(layout.sizes, elements)
        else:
            transfer = self._bind(self._addition, layout.sizes, layout.dtype, elements)
        if self.slots.room is not None:
            self.slots.room.take(self.give_way)
        self.slots.open_weights()
        held = self.slots.weights()
        # Owners send from their Parameters. Every rank waits for gathers before the optimizer writes to them:
        # in the passes, also if it only sends, and at last in HomeGradients.finish().
        contents = {
            e: [weight.detach().contiguous() for weight in owned[e]]
            if e in owned
            else held[e].split(layout.sizes)
            for e in (*transfer.shared_experts, *transfer.received_experts)
        }
        self._gathering.append(transfer.start_all_gather(contents, self._puts))

    def settle_gathers(self) -> None:
        """Wait for the weights that have been sent for."""
        if not self._gathering:
            return
        with self._waiting():
            for pending in self._gathering:
                pending.wait()
        self._gathering.clear()

    # Gradients.

    def open_sums(self) -> None:
        """Provide the memory to which the backward pass of the experts adds the replicas' gradients."""
        self.settle()
        self.slots.open_sums()

    def add_gradients(self) -> None:
        """Add what a complete backward pass has left to the sums.

        Raises:
            RuntimeError: The sums are on their way, so the gradients would be lost.
        """
        if self._reducing is not None:
            raise RuntimeError(
                f"{self._experts.name}: got gradients of replicas while their sums are on their way, wanted "
                "them before: passes came out of turn; please report their schedule"
            )
        self._experts.await_gradients()
        self.slots.add_gradients()

    @traced("reduce gradients")
    def reduce(self, dtype: torch.dtype) -> None:
        """Start SparseReduceScatter of the present sums; they travel in ``dtype``, equal on all ranks."""
        self.open_sums()  # A replica may have had no rows.
        self._experts.await_gradients()
        layout, owned, sums = self.slots.layout, self._experts.parameters, self.slots.sums()
        transfer = self._transfer([layout.trained_numel], range(layout.trained_numel))
        # Nothing else is added to the owner's gradient before settle(), so the lane adds the sums to it,
        # beside the backward pass.
        totals = {e: GradientTotals(owned[e][: layout.num_trained]) for e in transfer.shared_experts}
        self._totals = [*totals.values()]
        self._reducing = transfer.start_reduce_scatter(
            {expert: [total] for expert, total in sums.items()},
            {expert: of_expert.tensors for expert, of_expert in totals.items()},
            dtype=dtype,
        )

    def settle(self) -> None:
        """Wait until the gradients on their way are in the owners', and give back the sums' memory."""
        if self._reducing is None:
            return
        with self._waiting():
            self._reducing.wait()
        self._reducing = None
        for totals in self._totals:
            totals.write()
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
