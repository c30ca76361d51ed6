"""Megatron's six dispatcher phases under the schedule that Parm selects for a forward pass, and the gate."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
from torch import Tensor
from torch.func import functional_call

from megatron_fssdp.dispatchers.parm.baseline_dispatcher import BaselineDispatcher
from megatron_fssdp.dispatchers.parm.direct_dispatchers import S1Dispatcher, S2Dispatcher
from megatron_fssdp.dispatchers.parm.schedule_selector import ScheduleSelector, have_equal_tokens
from megatron_fssdp.planning.cost.tensor_schedules import Schedule

_DISPATCHERS: dict[Schedule, type[MoETokenDispatcher]] = {
    "baseline": BaselineDispatcher,
    "megatron": MoEAlltoAllTokenDispatcher,
    "s1": S1Dispatcher,
    "s2": S2Dispatcher,
}


class ParmDispatcher(MoETokenDispatcher):
    """Hands each forward pass to the dispatcher of its schedule.

    If tensor-parallel ranks have the same tokens (tensor parallelism without sequence parallelism), the layer
    must route with :class:`DividedGate`, which calls :meth:`begin`. Otherwise the first phase does this.
    Under ``s1`` and ``megatron`` a rank then dispatches its own part of the tokens, and the last phase
    gathers the results of all parts (MP-AllGather).

    The caller may replace routing map and probabilities after the route, under ``s2`` alike on all
    tensor-parallel ranks. The host waits at one place in a forward pass, as in Megatron's dispatcher, but for
    ``baseline`` with varying sequence lengths and the first pass under ``auto``, which measures costs. The
    schedule is selected before the first phase and the gate of divided tokens. No CUDA graph can hold them.

    The positional arguments are those of Megatron's dispatchers, over slots: ``config.num_moe_experts`` is
    the number of slots of all devices. Layers with the same groups share the selector.
    """

    def __init__(self, *arguments: Any, selector: ScheduleSelector) -> None:
        self.num_local_experts, self.local_expert_indices, config, pg_collection = arguments
        super().__init__(config=config, pg_collection=pg_collection)
        self.owners_only = True  # No expert is in several slots; the caller keeps this up to date.
        self.decision: Any = None  # for the present forward pass, or for the last one
        self._arguments, self._selector, self._peers = arguments, selector, pg_collection.tp
        self._are_equal = have_equal_tokens(config, pg_collection)
        self._dispatchers: dict[Schedule, Any] = {}
        self._current: Any = None
        self._whole: Any = None
        self._is_divided = self._adds_shared = False

    def begin(self, hidden_states: Tensor) -> bool:
        """Select the schedule for undivided hidden states ``[sequence, batch, M]`` at the begin of a pass.

        Returns whether this rank must dispatch its own part of the tokens instead of all of them.
        """
        self.decision = decision = self._selector.of(hidden_states, owners_only=self.owners_only)
        self._is_divided = self._are_equal and decision.schedule in ("s1", "megatron")
        # With different tokens on all ranks, s2 is s1.
        schedule = "s1" if decision.schedule == "s2" and not self._are_equal else decision.schedule
        if schedule not in self._dispatchers:
            self._dispatchers[schedule] = _DISPATCHERS[schedule](*self._arguments)
        self._current, self._whole = self._dispatchers[schedule], hidden_states
        for phase in ("token_dispatch", "dispatch_postprocess", "combine_preprocess", "token_combine"):
            setattr(self, phase, getattr(self._current, phase))  # Phases 2 to 5 are the schedule's own.
        self._current.simultaneous = decision.simultaneous  # S2 alone reads it.
        if self.shared_experts is not self._current.shared_experts:
            self._current.set_shared_experts(self.shared_experts)
        return self._is_divided

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        """Phase 1: exchange counts, permute tokens ``[sequence, batch, M]`` for their slots ``[T, W]``.

        They must be divided as the schedule requires.
        """
        if self._whole is None:
            self.begin(hidden_states)
        whole, self._whole = self._whole, None
        num_tokens, schedule = whole.shape[:-1].numel(), self.decision.schedule
        parts = self._peers.size() if self._is_divided else 1
        if len(routing_map) * parts != num_tokens:
            raise RuntimeError(
                f"schedule {schedule}: got {len(routing_map)} of {num_tokens} tokens, wanted one part "
                f"of {parts}; route with DividedGate, and dispatch the tokens that it returns"
            )
        # Shared experts compute with all of the layer's own tokens, which are not always those to dispatch.
        is_apart = self._is_divided or schedule == "baseline"
        self._adds_shared = is_apart and self.shared_experts is not None
        if self._adds_shared:
            self.shared_experts.pre_forward_comm(whole)
            self._current.shared_experts = None
        dispatched = self._current.dispatch_preprocess(hidden_states, routing_map, probs)
        self._current.shared_experts = self.shared_experts
        return dispatched

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Phase 6: sum each token's results, ``[sequence, batch, M]``, and add overlapped shared experts."""
        if self._adds_shared:
            self._current.shared_experts = None
        output = self._current.combine_postprocess(hidden_states)
        self._current.shared_experts = self.shared_experts
        if self._is_divided:
            output = gather_from_sequence_parallel_region(
                output, tensor_parallel_output_grad=False, group=self._peers
            )
        return output + self.shared_experts.get_output() if self._adds_shared else output


class DividedGate:
    """The gate of a layer whose tensor-parallel ranks have the same tokens: without sequence parallelism.

    Megatron refuses to train MoE layers in this case. Parm supports it: S1 divides the tokens before
    the gate, S2 divides their rows after it (Parm, §III-B)::

        s1, megatron    rank 0: tokens of part 0 -> gate -> dispatch      gradients of the gate are summed
                        rank 1: tokens of part 1 -> gate -> dispatch      over the tensor-parallel ranks
        s2, baseline    all ranks: all tokens -> gate -> dispatch

    Gradients equal those of the layer on one rank, including the gradients of auxiliary losses. ``router``
    may be an adapter around ``gate``, which is Megatron's.
    """

    def __init__(self, router: Any, gate: Any, pg_collection: Any) -> None:
        self._router, self._gate, self._peers = router, gate, pg_collection.tp
        self._divided_groups = gate.tp_cp_group, gate.tp_dp_cp_group
        # Where all ranks have the same tokens, an auxiliary loss must count every token once. It is then
        # computed over the context-parallel and data-parallel ranks only.
        data_parallel = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._whole_groups = pg_collection.cp, data_parallel

    def route(
        self, dispatcher: ParmDispatcher, hidden: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Begin a forward pass of the dispatcher and run the router.

        The layer's ``route`` calls it instead of the router and returns the last two results. The layer's
        ``preprocess`` then goes on with the first one in place of the hidden states that it is given.

        Hidden states ``[sequence, batch, M]`` and the mask of padding tokens, bool ``[sequence, batch]``, are
        equal on all tensor-parallel ranks. Returns the tokens to dispatch, under ``s1`` and ``megatron`` this
        rank's part of the sequence, with their probabilities and routing map, ``[T, E]``.
        """
        router, gate = self._router, self._gate
        if not dispatcher.begin(hidden):
            gate.tp_cp_group, gate.tp_dp_cp_group = self._whole_groups
            return hidden, *router(hidden, padding_mask)
        gate.tp_cp_group, gate.tp_dp_cp_group = self._divided_groups
        own = scatter_to_sequence_parallel_region(hidden, group=self._peers)
        if padding_mask is not None:
            padding_mask = padding_mask.chunk(self._peers.size())[self._peers.rank()]
        parameters = {name: self._summed(p) for name, p in router.named_parameters()}
        return own, *functional_call(router, parameters, (own, padding_mask))

    def _summed(self, parameter: Tensor) -> Tensor:
        """The parameter; its gradient, of own tokens only, is summed over the ranks, in fp32 or wider."""
        wide = parameter.to(torch.promote_types(parameter.dtype, torch.float32))
        summed: Tensor = copy_to_tensor_model_parallel_region(wide, group=self._peers)
        return summed.to(parameter.dtype)
