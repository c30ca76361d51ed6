"""The gradients of one layer's replicas in an iteration: complete, on their way to the owners, home.

A backward pass is complete when its dispatch is over and its weight gradients are computed. Megatron can
delay the latter (``--delay-wgrad-compute``). Sums of an iteration leave after its last backward pass, those
of re-materialized replicas and of replicas of one micro-batch after each.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from megatron_fssdp.collectives.sparse.transfer_cargo import accumulation_dtype
from megatron_fssdp.runtime.clocks.pass_timer import LayerTimer
from megatron_fssdp.runtime.experts.local_experts import LocalExperts
from megatron_fssdp.runtime.layers.iteration_clock import IterationClock
from megatron_fssdp.runtime.layers.pass_maker import PassMaker
from megatron_fssdp.runtime.layers.slot_pass import SlotPass
from megatron_fssdp.runtime.slots.replica_transfers import ReplicaTransfers
from megatron_fssdp.runtime.slots.resident_gradients import ResidentGradients


class HomeGradients:
    """Brings the replicas' gradients of one layer to their owners. All ranks make the same calls in order.

    Shape letters: D devices, E experts.

    Args:
        clock: Clock of iterations.
        timer: Timer of the layer, which leaves out waits for transfers.
        maker: Maker of the layer's passes, to which slots of single micro-batches return.

    Attributes:
        experts: Experts that have Parameters on this rank; the layer keeps it up to date.
        is_home: Whether no gradient of a replica is missing at its owner.
        on_home: Function that is called when all gradients of an iteration have reached the owners.
        on_complete: Function that is called when a backward pass of the layer is complete.
        delays_weight_gradients: Whether the weight gradients are computed apart from the backward pass.
    """

    def __init__(
        self, clock: IterationClock, timer: LayerTimer, maker: PassMaker, experts: LocalExperts
    ) -> None:
        self._clock, self._timer, self._maker, self.experts = clock, timer, maker, experts
        self.on_home: Callable[[], object] = lambda: None
        self.on_complete: Callable[[], object] = lambda: None
        self.delays_weight_gradients = False
        self.is_home = True
        self._own: list[SlotPass] = []
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the passes of the iteration; their gradients are dropped."""
        for own in self._own:
            self._maker.give_back(own)
        self.is_home = True
        self._own = []
        self._is_reduced = False
        self._num_complete = 0
        self._num_computed = 0
        self._over: deque[SlotPass] = deque()
        self._residents: ResidentGradients | None = None

    def add_own(self, own: SlotPass) -> None:
        """Take care of a pass of one micro-batch, until its gradients are home or :meth:`end_own`."""
        self._own.append(own)

    def own_of(self, counts_DE: np.ndarray) -> SlotPass | None:
        """The pass of the first micro-batch with these counts whose backward pass has yet to recompute it.

        Args:
            counts_DE: Counts of a micro-batch, int64 ``[D, E]``.
        """
        for own in self._own:
            if own.is_over or own.is_recomputed or own.counts_DE is None:
                continue
            if np.array_equal(own.counts_DE, counts_DE):
                return own
        return None

    def experts_begin_backward(self, one: SlotPass) -> None:
        """Provide the weights that the experts' backward pass needs, and the memory for its gradients."""
        self.is_home = False
        for own in [own for own in self._own if own.is_over]:
            self.end_own(own)  # Its gradients have travelled since the last backward pass of this layer.
        if one.transfers is not None:
            one.transfers.begin_use(backward=True)
            one.transfers.await_weights()
            one.transfers.open_sums()

    def dispatch_is_over(self, one: SlotPass) -> None:
        """Mark that the dispatch of a pass has run backward."""
        self._over.append(one)
        if self.delays_weight_gradients:
            self._go_on()
        else:
            self.weight_gradients_computed()

    def weight_gradients_computed(self) -> None:
        """Mark that the weight gradients of one more backward pass are computed."""
        self._num_computed += 1
        self._go_on()

    def settle(self, shared: SlotPass | None) -> None:
        """Wait for the gradients on their way home, at a moment when other compute has hidden them.

        For resident replicas, this does one step of their all-reduce.

        Args:
            shared: Pass of the iteration.
        """
        for own in [own for own in self._own if own.is_over]:
            self.end_own(own)
        if self._residents is not None:
            with self._timer.waiting():
                self._residents.advance()
            is_home = self._residents.is_finished
        else:
            if shared is not None and shared.transfers is not None:
                shared.transfers.settle()
            is_home = self._num_complete >= self._clock.num_micro_batches > 0
        if is_home:
            self._are_home()

    def finish(self, shared: SlotPass | None) -> None:
        """Bring all remaining gradients to the owners and wait.

        Args:
            shared: Pass of the iteration.
        """
        if self.is_home:
            return
        if shared is not None and shared.plan.resident:
            with self._timer.waiting():
                self._sum_residents(shared).finish()
        elif shared is not None and shared.transfers is not None:
            if not shared.plan.rematerialize:
                self._reduce_iteration(shared.transfers)
            shared.transfers.settle()
        for own in list(self._own):
            self.end_own(own)
        self._are_home()

    def end_own(self, own: SlotPass) -> None:
        """Give back the slots of a pass of one micro-batch, after its gradients are home."""
        self._own.remove(own)
        if own.transfers is not None:
            own.transfers.settle()
        self._maker.give_back(own)

    def _go_on(self) -> None:
        while self._num_computed and self._over:
            self._num_computed -= 1
            self._complete(self._over.popleft())

    def _complete(self, one: SlotPass) -> None:
        """Send the gradients of a backward pass home, or after the last one those of the whole iteration."""
        self._num_complete += 1
        is_last = self._num_complete == self._clock.num_micro_batches
        if one.transfers is None:
            if one.plan.resident and is_last:
                self._sum_residents(one).reduce()
            if not one.is_shared:
                self.end_own(one)
        else:
            one.transfers.end_use()
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
                if not (self._clock.driven and one.plan.gather_ahead):
                    self.settle(one if one.is_shared else None)
        self.on_complete()

    def _reduce_iteration(self, transfers: ReplicaTransfers) -> None:
        if self._is_reduced:
            return
        self._is_reduced = True
        dtype = transfers.slots.layout.dtype
        is_summed = transfers.plan.life.sums_gradients(self._clock.num_micro_batches)
        transfers.reduce(accumulation_dtype(dtype) if is_summed else dtype)

    def _sum_residents(self, one: SlotPass) -> ResidentGradients:
        if self._residents is None:
            layout = self.experts.layout()
            transfer = self._maker.bind(
                one.plan.transfer, self.experts, layout.numel, accumulation_dtype(layout.dtype)
            )
            self._residents = ResidentGradients(transfer, layout, self.experts.all_parameters)
        return self._residents

    def _are_home(self) -> None:
        if not self.is_home:
            self.is_home = True
            self.on_home()
