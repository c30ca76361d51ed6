"""What a strategy knows about a layer, and the plan with which it answers.

Shape letters: D devices, E experts.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy, TokenDispatch, plan_dispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan


@dataclass(frozen=True, eq=False)
class LayerContext:
    """The data of one MoE layer that a strategy may use.

    Attributes:
        layer: Megatron's layer number, counted from 1 over the whole model.
        owner_E: Owner of each expert, int64 ``[E]``: the device with its parameters and optimizer state.
        topology: Nodes of the layer's expert-parallel ranks.
        profile: Measured costs; ``None`` before they are measured.
        resident: Placement of owners and resident replicas; ``None`` if there are no resident replicas.
        num_since_jump: Number of iterations since the layer's loads jumped; ``None`` if they did not jump
            lately. Only :meth:`Strategy.reshard` may rely on it; elsewhere it may be ``None``. Ranks with
            copies of the same experts all get the smallest of their numbers.
        shares_evenly: Whether tokens must be shared out evenly among holders, because a CUDA graph contains
            the remap.
    """

    layer: int
    owner_E: np.ndarray
    topology: Topology
    profile: LayerProfile | None = None
    resident: ExpertPlacement | None = None
    num_since_jump: int | None = None
    shares_evenly: bool = False

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
        """The plan without replicas, kept for the next call."""
        placement = ExpertPlacement.owners_only(self.owner_E, self.num_devices)
        return LayerPlan(placement, TransferPlan(self.num_devices, np.empty((0, 4), np.int64)))


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one layer for one iteration; the runtime and the simulator both carry it out.

    Attributes:
        placement: Owners and replicas of the layer's experts.
        transfer: Edges along which weights travel to the replicas. Gradients travel to the owners along the
            same edges in the opposite direction.
        gather_ahead: Whether transfers run beside compute. The gather then starts before the compute that
            precedes the layer, instead of when the layer's tokens are ready for the dispatch. The reduction
            runs beside the backward pass of that compute.
        rematerialize: Whether to release the replicas between the forward and the backward pass, and to
            gather weights and reduce gradients in every micro-batch (Hecate §4.2). Otherwise both happen once
            in an iteration.
        dispatch_policy: How each micro-batch's tokens are split among the holders of their experts.
        each_micro_batch: Whether to ask :meth:`Strategy.after_gate` again with the counts of every
            micro-batch. The replicas of its answer are gathered beside the dispatch and reduced for that
            micro-batch alone. The plan of the iteration then has no replicas.
        early: Share of every expert's weights, from 0 to 1, that travels beside the experts of the layer
            before, instead of the compute between the two layers. It applies to weights that stay for an
            iteration, and not under the smart schedule.
        tokens_ED: Number of pairs of each expert that each device computes in this micro-batch, int64
            ``[E, D]``. It replaces the dispatch policy. ``None`` uses the policy.
        resident: Whether the replicas are resident. They have Parameters of their own, so no weights travel.
            An iteration's gradients are summed at the owners and given back to the replicas.
        in_steps: Whether dispatch, experts and combine run in the steps of the smart schedule. Strategies do
            not set it; ``strategies/layer_planning.py`` does.
        deduplicated: Whether tokens travel by the deduplicated exchange. Strategies do not set it, either.
    """

    placement: ExpertPlacement
    transfer: TransferPlan
    gather_ahead: bool = True
    rematerialize: bool = False
    dispatch_policy: DispatchPolicy = "even"
    each_micro_batch: bool = False
    early: float = 0.0
    tokens_ED: np.ndarray | None = None
    resident: bool = False
    in_steps: bool = False
    deduplicated: bool = False

    def __post_init__(self) -> None:
        self.transfer.check_serves(self.placement)
        if not 0 <= self.early <= 1:
            raise ValueError(f"early is {self.early}: wanted a share from 0 to 1")

    @property
    def life(self) -> ReplicaLife:
        """How long the plan's replicas stay on their devices."""
        if self.resident:
            return ReplicaLife.RESIDENT
        if self.each_micro_batch:
            return ReplicaLife.MICRO_BATCH
        return ReplicaLife.LAYER_PASS if self.rematerialize else ReplicaLife.ITERATION

    @property
    def is_split(self) -> bool:
        """Whether a part of the weights travels beside the experts of the layer before, if there is one."""
        return self.gather_ahead and self.life is ReplicaLife.ITERATION and self.early > 0

    @property
    def needs_counts(self) -> bool:
        """Whether the host needs counts to share an expert's tokens out among its holders."""
        return self.tokens_ED is not None

    @property
    def shares_exactly(self) -> bool:
        """Whether the device shares tokens out by the exact counts of every micro-batch."""
        is_exact = self.dispatch_policy == "exact" and self.tokens_ED is None
        return is_exact and self.placement.num_replicas > 0

    def digest(self) -> bytes:
        """A 16-byte hash of everything that decides where tokens and weights go, equal for equal plans."""
        digest = hashlib.blake2b(self.placement.digest(), digest_size=16)
        digest.update(self.transfer.table.tobytes())
        digest.update(b"" if self.tokens_ED is None else self.tokens_ED.astype("<i8").tobytes())
        ways = (self.gather_ahead, self.rematerialize, self.dispatch_policy, self.each_micro_batch)
        more = (float(self.early), self.resident, self.in_steps, self.deduplicated)
        digest.update(repr((*ways, *more)).encode())
        return digest.digest()

    @classmethod
    def owners_only(cls, context: LayerContext, *, each_micro_batch: bool = False) -> "LayerPlan":
        """A plan without replicas. The context keeps it for the next call."""
        plan = context.owners_only
        return replace(plan, each_micro_batch=True) if each_micro_batch else plan

    def dispatch(
        self, counts_DE: np.ndarray, topology: Topology, num_micro_batches: int = 1
    ) -> TokenDispatch:
        """All dispatches of equal micro-batches that have these (token, k) pairs together, ``[D, E]``."""
        if self.tokens_ED is None:
            return plan_dispatch(self.dispatch_policy, counts_DE, self.placement, topology)
        # The quotas belong to one micro-batch.
        return TokenDispatch(counts_DE, num_micro_batches * self.tokens_ED, topology)
