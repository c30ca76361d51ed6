"""The ledger of gradients of one layer's replicas: complete, on their way to the owners, home.

A backward pass is complete when its dispatch is over and its weight gradients are computed. Megatron can
delay the latter (``--delay-wgrad-compute``). Sums of an iteration leave after its last backward pass, those
of re-materialized replicas and of replicas of one micro-batch after each.

How many backward passes come is a hint: what a schedule announced, corrected by the iteration before. If one
comes after the sums have left, they are opened again, and leave again before DDP reduces the gradients.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import torch
from torch.autograd.graph import get_gradient_edge

from megatron_fssdp.collectives.sparse.transfer_cargo import accumulation_dtype
from megatron_fssdp.runtime.layers.layer_passes import LayerPasses
from megatron_fssdp.runtime.layers.local_layer import LocalLayer
from megatron_fssdp.runtime.layers.pass_binder import SlotPass
from megatron_fssdp.runtime.slots.autograd_points import call_in_backward
from megatron_fssdp.runtime.slots.gradient_totals import gradient_to_fill, sum_over_holders


class HomeGradients:
    """Brings the replicas' gradients of one layer to their owners. All ranks make the same calls in order.

    ``on_home`` is called when all gradients have reached the owners.
    """

    def __init__(self, local: LocalLayer, passes: LayerPasses, on_home: Callable[[], object]) -> None:
        self._local, self._passes, self._on_home = local, passes, on_home
        self._resident_sums: Iterator[None] | None = None
        # Owned experts alone have got gradients, of which resident replicas get none.
        self.passes_residents = False
        self._num_before = 0, 0  # backward passes and announced micro-batches of the iteration before
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the passes of the iteration; their gradients are dropped."""
        for own in list(self._passes.own):
            own.is_dropped = True
            self._passes.give_back(own)
        self._drop_resident_sums()
        self.is_home = True
        self._is_reduced = False  # Nothing may be added any more.
        self._has_sums = False  # of the iteration that have not left
        self._num_summed = 0  # backward passes in them
        self.num_complete = 0  # backward passes of the iteration
        self._num_computed = 0
        self._over: deque[SlotPass] = deque()

    def note_iteration(self) -> None:
        """Note how many backward passes the iteration had, before it is forgotten."""
        if self.num_complete:
            self._num_before = self.num_complete, self._local.clock.num_micro_batches

    def note_reduction(self) -> None:
        """Note that the gradients of the iteration are reduced over the data-parallel ranks."""
        self._is_reduced = self._local.clock.driven

    @property
    def has_begun(self) -> bool:
        """Whether a backward pass or a reduction of the iteration has begun."""
        return not self.is_home or self._is_reduced or self.num_complete > 0

    @property
    def _num_expected(self) -> int:
        """Backward passes after which sums leave early; 0 if nothing is known."""
        (passes, micro_batches), announced = self._num_before, self._local.clock.num_micro_batches
        if announced and micro_batches and not passes % micro_batches:
            return announced * passes // micro_batches  # A layer may run several times in a micro-batch.
        return announced or passes

    def at_dispatch(self, slot_pass: SlotPass, hidden: torch.Tensor) -> torch.Tensor:
        """Mark, where the dispatch begins, the end of its backward pass; a pass goes on with the result."""
        return call_in_backward(partial(self._dispatch_is_over, slot_pass), hidden)

    def experts_begin_backward(self, slot_pass: SlotPass) -> None:
        """Provide the weights that the experts' backward pass needs, and the memory for its gradients.

        Raises:
            RuntimeError: DDP has reduced the gradients already, or the pass belongs to dropped gradients, or
                the loop asks for gradients of single weights, or has left some in ``.grad``.
        """
        is_stale = slot_pass.is_shared and slot_pass.has_gradients and slot_pass is not self._passes.shared
        if self._is_reduced or slot_pass.is_dropped or is_stale:
            when = "reduced gradients" if self._is_reduced else "set gradients to zero or ended the iteration"
            # Of each step, DDP is told that gradients are complete.
            more = ", and the model once in a micro-batch under smart_schedule with overlap_grad_reduce"
            raise RuntimeError(
                f"{self._local.experts.name}: got a backward pass after the loop had {when}, wanted it "
                "before; run all backward passes between zero_grad_buffer() and finalize_model_grads()"
                f"{more if self._is_reduced and slot_pass.plan.in_steps else ''}"
            )
        experts = self._local.experts
        # Copies get gradients only if all tensors of the graph do.
        is_partial = slot_pass.has_gradients and not torch.autograd._is_checkpoint_valid()
        if is_partial and any(map(_is_asked_for, chain(*experts.parameters.values()))):
            raise RuntimeError(
                f"{experts.name}: got torch.autograd.grad() or backward(inputs=...) for weights of experts, "
                "wanted backward() alone, because only it reaches their replicas; call it, or use "
                "--moe-strategy none"
            )
        first = next(chain(*experts.parameters.values()), None)
        if first is not None and first.grad is not None and first.grad is getattr(first, "main_grad", None):
            raise RuntimeError(
                f"{experts.name}: got main_grad in .grad, where Megatron's optimizer puts it for its step, "
                "wanted none, because DDP adds one to the other; call its zero_grad() in each iteration"
            )
        if not slot_pass.plan.resident and (resident := self._local.context.resident) is not None:
            self.passes_residents |= resident.num_replicas > 0
        self.is_home = False
        if slot_pass.sums_passes:
            self._reopen_residents()
            self._has_sums = True
        self._end_those_over()  # Their gradients have travelled since the last backward pass of this layer.
        if slot_pass.transfers is not None:
            slot_pass.transfers.begin_use(backward=True)
            slot_pass.transfers.await_weights()
            slot_pass.transfers.open_sums()
        if not slot_pass.ends_at_dispatch:
            self._dispatch_is_over(slot_pass)  # Nothing leaves, and who asks does so after the experts.

    def _dispatch_is_over(self, slot_pass: SlotPass) -> None:
        """Mark that the dispatch of a pass has run backward."""
        self._over.append(slot_pass)
        self._num_computed += not self._local.context.delays_gradients
        self._go_on()

    def weight_gradients_computed(self) -> None:
        """Mark that the weight gradients of one more backward pass are computed, if they are delayed."""
        self._num_computed += self._local.context.delays_gradients
        self._go_on()

    def settle(self, *, with_iteration: bool = True) -> None:
        """Wait for the gradients on their way home, at a moment when other compute has hidden them.

        Resident replicas take one step of their all-reduce. Those of the iteration's replicas are awaited
        only ``with_iteration``.
        """
        self._end_those_over()
        shared = self._passes.shared if with_iteration else None
        if self._resident_sums is not None:
            with self._local.timer.waiting():
                is_home = next(self._resident_sums, True) is True
        else:
            if shared is not None and shared.transfers is not None:
                shared.transfers.settle()
            is_home = self.num_complete >= self._num_expected > 0 and not self._has_sums
        if is_home:
            self._are_home()

    def finish(self) -> None:
        """Bring all remaining gradients to the owners and wait; every rank of the group must call it."""
        shared = self._passes.shared
        if shared is not None and shared.transfers is not None:
            shared.transfers.settle_gathers()
        if self.is_home:
            return
        if shared is not None and self._has_sums:
            self._send_sums(shared)
        if self._resident_sums is not None:
            with self._local.timer.waiting():
                for _ in self._resident_sums:
                    pass
        if shared is not None and shared.transfers is not None:
            shared.transfers.settle()
        self._end_those_over()  # Others wait for their backward passes.
        self._are_home()

    def end_forward(self, slot_pass: SlotPass) -> None:
        """End the use of the weights by a forward pass, and a pass without a backward pass altogether."""
        if slot_pass.transfers is not None:
            slot_pass.transfers.end_use()
        if not slot_pass.is_shared and not torch.is_grad_enabled():
            self._end_own(slot_pass)

    def _end_own(self, own: SlotPass) -> None:
        """Give back the slots of a pass of one micro-batch, after its gradients are home."""
        if own.transfers is not None:
            own.transfers.settle()
        self._passes.give_back(own)

    def _end_those_over(self) -> None:
        for own in [own for own in self._passes.own if own.is_over]:
            self._end_own(own)

    def _go_on(self) -> None:
        while self._num_computed and self._over:
            self._num_computed -= 1
            self._complete(self._over.popleft())

    def _complete(self, slot_pass: SlotPass) -> None:
        self.num_complete += 1
        self._num_summed += 1
        transfers, plan = slot_pass.transfers, slot_pass.plan
        if transfers is not None:
            transfers.end_use()
            transfers.add_gradients()
        if slot_pass.sums_passes:
            if self.num_complete == self._num_expected:
                self._send_sums(slot_pass)
                if transfers is not None and not plan.gather_ahead:
                    transfers.settle()
        elif transfers is not None:
            # One micro-batch's gradients travel in the data type of the weights, which is what a backward
            # pass computes.
            transfers.reduce(transfers.slots.layout.dtype)
            slot_pass.is_over = True
            if not slot_pass.is_shared:
                transfers.release()
            if not plan.gather_ahead:
                self.settle(with_iteration=slot_pass.is_shared)
        elif not slot_pass.is_shared:
            self._end_own(slot_pass)
        self._passes.prefetch_before()

    def _send_sums(self, shared: SlotPass) -> None:
        """Let the sums of the iteration begin their way home."""
        layout, is_summed = self._local.experts.layout(), shared.plan.life.sums_gradients(self._num_summed)
        dtype, self._has_sums, self._num_summed = accumulation_dtype(layout.dtype), False, 0
        if shared.transfers is not None:
            shared.transfers.reduce(dtype if is_summed else layout.dtype)
        elif self._resident_sums is None:
            self._local.experts.await_gradients()
            transfer = self._local.bind(shared.plan.transfer, layout.sizes, dtype)
            self._resident_sums = sum_over_holders(transfer, self._local.experts.all_parameters)
            next(self._resident_sums)

    def _drop_resident_sums(self) -> None:
        for _ in self._resident_sums or ():
            pass  # Transfers on their way use the gradients.
        self._resident_sums = None

    def _reopen_residents(self) -> None:
        """Let only owners keep sums that all holders got already, so that the next sums do not count them."""
        if self._resident_sums is None:
            return
        self._drop_resident_sums()
        experts = self._local.experts
        for expert in experts.residents.keys() - experts.parameters.keys():
            for parameter in experts.residents[expert]:
                if (gradient := gradient_to_fill(parameter)) is not None:
                    gradient.zero_()

    def _are_home(self) -> None:
        if not self.is_home:
            self.is_home = True
            self._on_home()


def _is_asked_for(parameter: torch.nn.Parameter) -> bool:
    """Whether a backward pass for the gradients of some tensors only is running, and this is one of them."""
    try:
        node = get_gradient_edge(parameter).node if parameter.requires_grad else None
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad() would return its gradient.
        return True
