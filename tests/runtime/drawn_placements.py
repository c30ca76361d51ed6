"""Strategies of a case: random placements, or a real strategy with known costs.

Shape letters: E experts, D devices.
"""

from dataclasses import replace
from typing import get_args

import numpy as np

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import plain_transfer, two_level_transfer
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import Strategy

from .layer_case import LayerCase

# These strategies get planted measurements; fssdp takes its limits from the settings.
MEASURING = ("fastermoe", "prophet", "quota")


# Experts are cheap to move, so that every strategy that compares costs moves some.
PROFILE = LayerProfile(
    non_moe_s=1.0,
    cluster=ClusterCost(LinkCost(0.0, 1e-3), LinkCost(0.0, 2e-3), expert_flops_per_s=1e3),
    expert_bytes=1,
    token_bytes=8,
    flops_per_token=1e3,
    memory_capacity=8,
)


class DrawnPlacements(Strategy):
    """A strategy for tests: a new random placement of one kind, and a policy, with every plan."""

    exchange = "pairs"  # the case's exchange is passed to the layer
    window = 100  # the strategy ignores the history, but tests count its iterations
    replica_life = ReplicaLife.ITERATION

    def __init__(self, case: LayerCase) -> None:
        self.kind = case.placement
        self.rng = np.random.default_rng(case.seed)
        self.rematerialize = case.transfers == "rematerialized"
        if case.transfers.startswith("resident"):
            self.replica_life = ReplicaLife.RESIDENT
        elif self.rematerialize:
            self.replica_life = ReplicaLife.LAYER_PASS
        elif case.transfers.startswith("each"):
            self.replica_life = ReplicaLife.MICRO_BATCH
        self.each_micro_batch = case.transfers.startswith("each")
        self.calibrated = case.calibrated
        self.has_steps, self.changes = case.group_size is not None, case.changes
        self.num_planned = 0

    @property
    def smart_schedule(self) -> bool:
        """Whether all ranks exchange in steps in the iteration that was planned last."""
        return self.has_steps and not (self.changes and self.num_planned % 2)

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Draw the next placement; all ranks draw the same ones."""
        self.num_planned += 1
        if context.resident is not None:
            transfer = two_level_transfer(context.resident, context.topology)
            return LayerPlan(context.resident, transfer, gather_ahead=False, resident=True)
        if self.each_micro_batch:
            return LayerPlan.owners_only(context, each_micro_batch=True)
        return self.drawn(context)

    def drawn(self, context: LayerContext) -> LayerPlan:
        """A plan with the next random placement."""
        return self._drawn(context, self.rng)

    def _drawn(self, context: LayerContext, rng: np.random.Generator) -> LayerPlan:
        shape = (context.num_experts, context.num_devices)
        share = {"owners": 0.0, "everywhere": 1.0}.get(self.kind, rng.choice([0.3, 0.6]))
        present_ED = rng.random(shape) < share
        poorest = int(np.bincount(context.owner_E, minlength=context.num_devices).argmin())
        if self.kind == "nowhere_else":
            present_ED[:, poorest] = False
        elif self.kind == "replicas_only":
            present_ED[rng.integers(context.num_experts), poorest] = True
        present_ED[np.arange(context.num_experts), context.owner_E] = True
        placement = ExpertPlacement(context.owner_E, present_ED)
        plain = rng.random() < 0.3
        return LayerPlan(
            placement,
            plain_transfer(placement) if plain else two_level_transfer(placement, context.topology),
            rematerialize=self.rematerialize,
            dispatch_policy=rng.choice(get_args(DispatchPolicy)),
        )

    def _drawn_by(self, context: LayerContext, counts_DE: np.ndarray) -> LayerPlan:
        """A plan that depends on the counts alone, and often exact quotas for them."""
        rng = np.random.default_rng(counts_DE.reshape(-1))
        plan = self._drawn(context, rng)
        tokens_ED = None
        if rng.random() < 0.7:
            present_ED, load_E = plan.placement.present_ED, counts_DE.sum(axis=0)
            tokens_ED = np.stack(
                [
                    rng.multinomial(load, here_D / here_D.sum())
                    for load, here_D in zip(load_E, present_ED, strict=True)
                ]
            )
        return replace(plan, each_micro_batch=True, tokens_ED=tokens_ED)

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """The same plan, the plan with other replicas, or a new plan; all ranks draw the same."""
        if self.each_micro_batch:
            return self._drawn_by(context, counts_DE)
        if not self.calibrated:
            return plan
        drawn_ED = self.rng.random(plan.placement.present_ED.shape)
        # Some replicas are dropped, some stay, and others are added.
        present_ED = np.where(plan.placement.present_ED, drawn_ED < 0.6, drawn_ED < 0.3)
        present_ED[np.arange(context.num_experts), context.owner_E] = True
        placement = ExpertPlacement(context.owner_E, present_ED)
        transfer = two_level_transfer(placement, context.topology)
        return replace(plan, placement=placement, transfer=transfer)


def strategy_of(case: LayerCase) -> Strategy:
    """A real strategy where the case names one, otherwise random placements."""
    if case.placement in STRATEGIES:
        in_steps = {} if case.group_size is None else {"smart_schedule": True}
        by_price = {"exchange": "by_price"} if case.deduplicated == "by_price" else {}
        model, keys = STRATEGIES[case.placement].settings, {**dict(case.settings), **in_steps, **by_price}
        return build_strategy(case.placement, model.model_validate(keys))
    return DrawnPlacements(case)


def profile_of(case: LayerCase) -> LayerProfile | None:
    """The costs that the case's strategy knows."""
    if case.deduplicated == "by_price":
        cluster = replace(PROFILE.cluster, intra=LinkCost(0.0, 1e-6))
        return replace(PROFILE, cluster=cluster, token_bytes=1_000_000, choices=TokenChoices(case.top_k))
    return PROFILE if case.placement in MEASURING else None
