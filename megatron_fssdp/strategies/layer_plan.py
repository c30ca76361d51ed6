"""What a strategy knows about a layer, and the plan with which it answers.

Shape letters: D devices, E experts, L MoE layers.
"""

import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.arrays import frozen_array
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy, TokenDispatch, plan_dispatch
from megatron_fssdp.planning.dispatch.whole_tokens import WholeTokens, whole_tokens
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan, two_level_transfer


@dataclass(frozen=True, eq=False)
class LayerContext:
    """The data of one MoE layer that a strategy may use.

    Attributes:
        layer: Megatron's layer number, counted from 1 over the whole model.
        owner_E: Owner of each expert, int64 ``[E]``: the device with its parameters and optimizer state.
        topology: Nodes of the layer's expert-parallel ranks.
        profile: Measured costs; ``None`` before they are measured.
        resident: Placement of owners and resident replicas; ``None`` if there are no resident replicas.
        shares_evenly: Whether a CUDA graph contains the remap, so that holders must get equal parts, and
            nothing can be planned after the gate.
        delays_gradients: Whether weight gradients are computed after the experts' backward pass, so that
            slots must keep their experts.
    """

    layer: int
    owner_E: np.ndarray
    topology: Topology
    profile: LayerProfile | None = None
    resident: ExpertPlacement | None = None
    shares_evenly: bool = False
    delays_gradients: bool = False

    @property
    def num_experts(self) -> int:
        """Number of routed experts of the layer, E."""
        return len(self.owner_E)

    @property
    def num_devices(self) -> int:
        """Number of ranks in the expert-parallel group, D."""
        return self.topology.num_devices

    @property
    def costs(self) -> LayerProfile:
        """The profile, once costs are measured."""
        assert self.profile is not None
        return self.profile

    @property
    def placement(self) -> ExpertPlacement:
        """The devices on which each expert has Parameters: owners and resident replicas."""
        return self.resident or self.owners_only.placement

    @cached_property
    def owners_only(self) -> "LayerPlan":
        """The plan without replicas."""
        placement = ExpertPlacement.owners_only(self.owner_E, self.num_devices)
        return LayerPlan(placement, TransferPlan(self.num_devices, np.empty((0, 4), np.int64)))

    @cached_property
    def owners_only_at_first(self) -> "LayerPlan":
        """The plan without replicas before those of each micro-batch."""
        return replace(self.owners_only, each_micro_batch=True)

    def with_exchange(self, deduplicated: bool) -> "LayerContext":
        """The same layer with prices of the deduplicated exchange, or of Megatron's."""
        is_priced = self.profile is None or self.profile.deduplicated == deduplicated
        return self if is_priced else self._with_other_exchange

    @cached_property
    def _with_other_exchange(self) -> "LayerContext":
        profile = replace(self.costs, deduplicated=not self.costs.deduplicated)
        return replace(self, profile=profile)


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one layer for one iteration; the runtime and the simulator both carry it out.

    Attributes:
        placement: Owners and replicas of the layer's experts.
        transfer: Edges along which weights travel to the replicas, and gradients back to the owners.
        gather_ahead: Whether the gather starts before the compute that precedes the layer, instead of at its
            dispatch, and the reduction runs beside the backward pass of that compute.
        rematerialize: Whether replicas are released between the passes, so that every micro-batch gathers
            weights and reduces gradients (Hecate §4.2), instead of once in an iteration.
        dispatch_policy: How each micro-batch's tokens are split among the holders of their experts.
        each_micro_batch: Whether :meth:`Strategy.after_gate` is asked in every micro-batch. Replicas of its
            answer live for that micro-batch; the plan of the iteration has none.
        corrects: Whether :meth:`Strategy.after_gate` is asked once, with the counts of the first micro-batch.
        early: Share of every expert's weights, from 0 to 1, that travels beside the experts of the layer
            before. It applies to weights that stay for an iteration, and not under the smart schedule.
        tokens_ED: Pairs of each expert that each device computes in this micro-batch, int64 ``[E, D]``, in
            place of a dispatch policy; or ``None``.
        resident: Whether replicas have Parameters of their own, so that no weights travel. Gradients are
            summed at the owners and given back to the replicas.
        in_steps: Whether dispatch, experts and combine run in the steps of the smart schedule. Strategies set
            neither this nor ``deduplicated``; ``layer_planning.py`` does.
        deduplicated: Whether tokens travel by the deduplicated exchange.
    """

    placement: ExpertPlacement
    transfer: TransferPlan
    gather_ahead: bool = True
    rematerialize: bool = False
    dispatch_policy: DispatchPolicy = "even"
    each_micro_batch: bool = False
    corrects: bool = False
    early: float = 0.0
    tokens_ED: np.ndarray | None = None
    resident: bool = False
    in_steps: bool = False
    deduplicated: bool = False

    def __post_init__(self) -> None:
        self.transfer.check_serves(self.placement)
        if not 0 <= self.early <= 1:
            raise ValueError(f"early is {self.early}: wanted a share from 0 to 1")

    def placed(self, placement: ExpertPlacement, context: LayerContext) -> "LayerPlan":
        """This plan with another placement, and the two-level transfer to it."""
        return replace(self, placement=placement, transfer=two_level_transfer(placement, context.topology))

    @property
    def life(self) -> ReplicaLife:
        """How long the plan's replicas stay on their devices."""
        if self.resident:
            return ReplicaLife.RESIDENT
        if self.each_micro_batch:
            return ReplicaLife.MICRO_BATCH
        return ReplicaLife.LAYER_PASS if self.rematerialize else ReplicaLife.ITERATION

    @property
    def sums_one_pass(self) -> bool:
        """Whether a sum of gradients holds what one backward pass computes, in one piece."""
        return self.life in (ReplicaLife.LAYER_PASS, ReplicaLife.MICRO_BATCH) and not self.in_steps

    @property
    def is_split(self) -> bool:
        """Whether a part of the weights travels beside the experts of the layer before."""
        return self.gather_ahead and self.life is ReplicaLife.ITERATION and self.early > 0

    @property
    def shares_exactly(self) -> bool:
        """Whether the device shares tokens out by the exact counts of every micro-batch."""
        is_exact = self.dispatch_policy == "exact" and self.tokens_ED is None
        return is_exact and self.placement.num_replicas > 0

    def digest(self) -> bytes:
        """A 16-byte hash of everything that decides where tokens and weights go."""
        digest = hashlib.blake2b(self.placement.digest(), digest_size=16)
        digest.update(self.transfer.table.tobytes())
        digest.update(b"" if self.tokens_ED is None else self.tokens_ED.astype("<i8").tobytes())
        ways = (self.gather_ahead, self.rematerialize, self.dispatch_policy, self.each_micro_batch)
        more = (float(self.early), self.resident, self.in_steps, self.deduplicated, self.corrects)
        digest.update(repr((*ways, *more)).encode())
        return digest.digest()

    @classmethod
    def owners_only(cls, context: LayerContext, *, each_micro_batch: bool = False) -> "LayerPlan":
        """A plan without replicas."""
        return context.owners_only_at_first if each_micro_batch else context.owners_only

    def dispatch(
        self, counts_DE: np.ndarray, topology: Topology, num_micro_batches: int = 1
    ) -> TokenDispatch:
        """All dispatches of equal micro-batches that have these (token, k) pairs together, ``[D, E]``."""
        if self.tokens_ED is None:
            return plan_dispatch(self.dispatch_policy, counts_DE, self.placement, topology)
        # The quotas belong to one micro-batch.
        return TokenDispatch(counts_DE, num_micro_batches * self.tokens_ED, topology)

    def whole_tokens(self, counts_DE: np.ndarray, topology: Topology, device: int) -> WholeTokens:
        """Whole pairs that a device sends and gets in a micro-batch with these counts, int64 ``[D, E]``."""
        quotas_ED = self.tokens_ED
        if quotas_ED is None:
            quotas_ED = self.dispatch(counts_DE, topology).whole_tokens_ED
        return whole_tokens(counts_DE, quotas_ED, topology, device)


class LastResults[Result]:
    """Each layer's last result of a pure function, which is also the next one if its arguments are equal.

    So what follows from a plan needs no second computation either.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[tuple[object, ...], np.ndarray, Result]] = {}

    def of(
        self, layer: int, same: tuple[object, ...], numbers: np.ndarray, make: Callable[[], Result]
    ) -> Result:
        """What ``make`` makes of the ``same`` objects, and of equal numbers, such as counts."""
        known = self._last.get(layer)
        if known is None or not (
            all(map(operator.is_, known[0], same))
            and (known[1] is numbers or np.array_equal(known[1], numbers))
        ):
            known = self._last[layer] = same, frozen_array(numbers, numbers.dtype), make()
        return known[2]
