"""The gradients of one layer's replicas in an iteration: complete, on their way to the owners, home.

A backward pass is complete when its dispatch is over and its weight gradients are computed. Megatron can
delay the latter (``--delay-wgrad-compute``). Sums of an iteration leave after its last backward pass, those
of re-materialized replicas and of replicas of one micro-batch after each.

How many backward passes come is a hint: what a schedule announced, corrected by the iteration before. If one
comes after the sums have left, they are opened again, and leave again before DDP reduces the gradients.
"""

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.sparse.transfer_cargo import accumulation_dtype
from megatron_fssdp.runtime.experts.expert_layout import ParametersByExpert
from megatron_fssdp.runtime.layers.planned_layer import PlannedLayer
from megatron_fssdp.runtime.layers.slot_pass import SlotPass
from megatron_fssdp.runtime.slots.replica_transfers import (
    GradientTotals,
    ReplicaTransfers,
    gradient_to_fill,
)


class HomeGradients:
    """Brings the replicas' gradients of one layer to their owners. All ranks make the same calls in order.

    If the caller's experts compute weight gradients apart from their backward pass, it sets
    ``delays_weight_gradients`` and marks them as computed.
    """

    def __init__(self, layer: PlannedLayer) -> None:
        self._layer = layer
        self._num_before = 0, 0  # backward passes and announced micro-batches of the iteration before
        self.on_home: Callable[[], object] = lambda: None  # All gradients have reached the owners.
        self.on_complete: Callable[[], object] = lambda: None  # A backward pass of the layer is complete.
        self.delays_weight_gradients = False
        self.own: list[SlotPass] = []  # Passes of single micro-batches whose gradients are not home.
        self._resident_sums: Iterator[None] | None = None
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the passes of the iteration; their gradients are dropped."""
        for own in self.own:
            own.is_dropped = True
            self._layer.give_back(own)
        for _ in self._resident_sums or ():
            pass  # Transfers on their way use the gradients.
        self.is_home = True
        self.is_reduced = False  # over the data-parallel ranks, so nothing may be added any more
        self.own = []
        self._has_sums = False  # of the iteration that have not left
        self._num_summed = 0  # backward passes in them
        self._num_complete = 0
        self._num_computed = 0
        self._over: deque[SlotPass] = deque()
        self._resident_sums = None

    def note_iteration(self) -> None:
        """Note how many backward passes the iteration had, before it is forgotten."""
        if self._num_complete:
            self._num_before = self._num_complete, self._layer.clock.num_micro_batches

    @property
    def has_begun(self) -> bool:
        """Whether a backward pass or a reduction of the iteration has begun."""
        return not self.is_home or self.is_reduced or self._num_complete > 0

    @property
    def _num_expected(self) -> int:
        """Backward passes after which sums leave early; 0 if nothing is known."""
        (passes, micro_batches), announced = self._num_before, self._layer.clock.num_micro_batches
        if announced and micro_batches and not passes % micro_batches:
            return announced * passes // micro_batches  # A layer may run several times in a micro-batch.
        return announced or passes

    def own_of(self, counts_DE: np.ndarray) -> SlotPass | None:
        """The pass of the first micro-batch with these counts whose backward pass has yet to recompute it."""
        for own in self.own:
            known_DE = None if own.is_over or own.is_recomputed else own.counts_DE
            if known_DE is not None and np.array_equal(known_DE, counts_DE):
                return own
        return None

    def experts_begin_backward(self, one: SlotPass) -> None:
        """Provide the weights that the experts' backward pass needs, and the memory for its gradients.

        Raises:
            RuntimeError: DDP has reduced the gradients already, or the pass belongs to dropped gradients.
        """
        is_stale = one.is_shared and one.has_gradients and one is not self._layer.shared
        if self.is_reduced or one.is_dropped or is_stale:
            when = "reduced gradients" if self.is_reduced else "set gradients to zero or ended the iteration"
            raise RuntimeError(
                f"{self._layer.experts.what}: got a backward pass after the loop had {when}, wanted it "
                "before; run all backward passes between zero_grad_buffer() and finalize_model_grads()"
            )
        self.is_home = False
        if one.is_shared and one.has_gradients and not one.plan.rematerialize:
            self._reopen_residents()
            self._has_sums = True
        self._end_those_over()  # Their gradients have travelled since the last backward pass of this layer.
        if one.transfers is not None:
            one.transfers.begin_use(backward=True)
            one.transfers.await_weights()
            one.transfers.open_sums()

    def dispatch_is_over(self, one: SlotPass) -> None:
        """Mark that the dispatch of a pass has run backward."""
        self._over.append(one)
        self._num_computed += not self.delays_weight_gradients
        self._go_on()

    def weight_gradients_computed(self) -> None:
        """Mark that the weight gradients of one more backward pass are computed."""
        self._num_computed += 1
        self._go_on()

    def settle(self, *, with_iteration: bool = True) -> None:
        """Wait for the gradients on their way home, at a moment when other compute has hidden them.

        Resident replicas take one step of their all-reduce. Those of the iteration's replicas are awaited
        only ``with_iteration``.
        """
        self._end_those_over()
        shared = self._layer.shared if with_iteration else None
        if self._resident_sums is not None:
            with self._layer.waiting():
                is_home = next(self._resident_sums, True) is True
        else:
            if shared is not None and shared.transfers is not None:
                shared.transfers.settle()
            is_home = self._num_complete >= self._num_expected > 0 and not self._has_sums
        if is_home:
            self._are_home()

    def finish(self) -> None:
        """Bring all remaining gradients to the owners and wait; every rank of the group must call it."""
        shared = self._layer.shared
        if shared is not None and shared.transfers is not None:
            shared.transfers.settle_gathers()
        if self.is_home:
            return
        if shared is not None and shared.plan.resident:
            if self._has_sums:
                self._sum_residents()
            with self._layer.waiting():
                for _ in self._resident_sums or ():
                    pass
        elif shared is not None and shared.transfers is not None:
            if self._has_sums:
                self._reduce_iteration(shared.transfers)
            shared.transfers.settle()
        for own in list(self.own):
            self.end_own(own)
        self._are_home()

    def end_own(self, own: SlotPass) -> None:
        """Give back the slots of a pass of one micro-batch, after its gradients are home."""
        self.own.remove(own)
        if own.transfers is not None:
            own.transfers.settle()
        self._layer.give_back(own)

    def _end_those_over(self) -> None:
        for own in [own for own in self.own if own.is_over]:
            self.end_own(own)

    def _go_on(self) -> None:
        while self._num_computed and self._over:
            self._num_computed -= 1
            self._complete(self._over.popleft())

    def _complete(self, one: SlotPass) -> None:
        self._num_complete += 1
        self._num_summed += 1
        is_last = self._num_complete == self._num_expected
        if one.transfers is None:
            if one.plan.resident and is_last:
                self._sum_residents()
            if not one.is_shared:
                self.end_own(one)
        else:
            one.transfers.end_use()
            one.transfers.add_gradients()
            if one.is_shared and not one.plan.rematerialize:
                if is_last:
                    self._reduce_iteration(one.transfers)
                    if not one.plan.gather_ahead:
                        one.transfers.settle()
            else:
                # One micro-batch's gradients travel in the data type of the weights, which is what a backward
                # pass computes.
                one.transfers.reduce(one.transfers.slots.layout.dtype)
                one.is_over = True
                if not one.is_shared:
                    one.transfers.release()
                if not one.plan.gather_ahead:
                    self.settle(with_iteration=one.is_shared)
        self.on_complete()

    def _reduce_iteration(self, transfers: ReplicaTransfers) -> None:
        dtype = transfers.slots.layout.dtype
        is_summed = transfers.plan.life.sums_gradients(self._num_summed)
        self._has_sums, self._num_summed = False, 0
        transfers.reduce(accumulation_dtype(dtype) if is_summed else dtype)

    def _reopen_residents(self) -> None:
        """Let only owners keep sums that all holders got already, so that the next sums do not count them."""
        if self._resident_sums is None:
            return
        for _ in self._resident_sums:
            pass
        self._resident_sums = None
        experts = self._layer.experts
        for expert in experts.residents.keys() - experts.parameters.keys():
            for parameter in experts.residents[expert]:
                if (gradient := gradient_to_fill(parameter)) is not None:
                    gradient.zero_()

    def _sum_residents(self) -> None:
        self._has_sums = False
        if self._resident_sums is None:
            experts, plan = self._layer.experts, self._layer.plan
            assert plan is not None
            layout = experts.layout()
            experts.await_gradients()
            transfer = self._layer.bind(plan.transfer, layout.sizes, accumulation_dtype(layout.dtype))
            self._resident_sums = sum_over_holders(transfer, experts.all_parameters)
            next(self._resident_sums)

    def _are_home(self) -> None:
        if not self.is_home:
            self.is_home = True
            self.on_home()


def sum_over_holders(transfer: SparseTransfer, parameters: ParametersByExpert) -> Iterator[None]:
    """Sum an iteration's gradients over the resident holders of each expert, in three steps of an iterator.

    The first step starts SparseReduceScatter, the second one SparseAllGather of the sums, and the last one
    waits. The caller lets other work hide what is running, and leaves the gradients alone. All ranks of the
    group take the same steps in the same order. The transfer is one of whole experts, in the sums' data type.
    """
    here = (*transfer.received_experts, *transfer.shared_experts)
    held = {expert: GradientTotals(parameters[expert], transfer.dtype) for expert in here}
    # Whether an expert is frozen is known on its own device alone, so zeros travel.
    contents = {
        expert: [
            torch.zeros(total.shape, dtype=transfer.dtype, device=transfer.device) if total.is_meta else total
            for total in one.tensors
        ]
        for expert, one in held.items()
    }
    received, shared = transfer.received_experts, transfer.shared_experts
    reduction = transfer.start_reduce_scatter(
        {e: contents[e] for e in received}, {e: contents[e] for e in shared}
    )
    yield
    reduction.wait()
    gathered = transfer.start_all_gather(contents)
    yield
    gathered.wait()
    for one in held.values():
        one.write()
