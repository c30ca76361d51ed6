"""Strategies of a case: random placements, or a real strategy with known costs.

Shape letters: E experts, D devices.
"""

from dataclasses import replace
from typing import get_args

import numpy as np

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.ep import EpSettings
from megatron_fssdp.strategies.layer_plan import LayerPlan
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import Strategy
from tests.support.random_placement import plain_transfer

POLICIES = tuple(dict.fromkeys((*get_args(DispatchPolicy), "exact")))


class DrawnPlacements(Strategy[EpSettings]):
    """With every plan a new random placement of one kind, and a policy.

    Plans depend on the case, the layer and the number of iterations, in whatever order layers are planned.
    """

    window = 100  # the strategy ignores the loads, but counts the iterations

    def __init__(self, case):
        super().__init__(EpSettings())
        self.case = case
        self.replica_life, self.overlaps, self.splits = case.life, case.overlaps, case.early > 0
        self.shares_plans = case.seed % 2 == 1

    def asks_after_gate(self, layer):
        return self.case.corrects

    def before_gate(self, context, history):
        if context.resident is not None:
            transfer = two_level_transfer(context.resident, context.topology)
            return LayerPlan(context.resident, transfer, gather_ahead=False, resident=True)
        if self.case.life is ReplicaLife.MICRO_BATCH:
            return LayerPlan.owners_only(context, each_micro_batch=True)
        return self.drawn(context, history.num_seen)

    def drawn(self, context, *number):
        kind, rng = self.case.placement, np.random.default_rng([self.case.seed, context.layer, *number])
        shape = (context.num_experts, context.num_devices)
        share = {"owners": 0.0, "everywhere": 1.0}.get(kind, rng.choice([0.3, 0.6]))
        present_ED = rng.random(shape) < share
        poorest = int(np.bincount(context.owner_E, minlength=context.num_devices).argmin())
        if kind == "nowhere_else":
            present_ED[:, poorest] = False
        elif kind == "replicas_only":
            present_ED[rng.integers(context.num_experts), poorest] = True
        present_ED[np.arange(context.num_experts), context.owner_E] = True
        placement = ExpertPlacement(context.owner_E, present_ED)
        is_plain = rng.random() < 0.3
        return LayerPlan(
            placement,
            plain_transfer(placement) if is_plain else two_level_transfer(placement, context.topology),
            gather_ahead=self.overlaps,
            rematerialize=self.case.life is ReplicaLife.LAYER_PASS
            or (self.case.mixes and rng.random() < 0.5),
            dispatch_policy=str(rng.choice(POLICIES)),
            early=self.case.early,
        )

    def after_gate(self, context, counts_DE, plan, num_micro_batches):
        """A new plan that depends on the counts, or the plan with other replicas; all ranks draw the same."""
        if self.case.life is ReplicaLife.MICRO_BATCH:
            return self._for_counts(context, counts_DE)
        rng = np.random.default_rng(counts_DE.reshape(-1))
        drawn_ED = rng.random(plan.placement.present_ED.shape)
        # Some replicas are dropped, some stay, and others are added.
        present_ED = np.where(plan.placement.present_ED, drawn_ED < 0.6, drawn_ED < 0.3)
        present_ED[np.arange(context.num_experts), context.owner_E] = True
        placement = ExpertPlacement(context.owner_E, present_ED)
        return replace(plan, placement=placement, transfer=two_level_transfer(placement, context.topology))

    def _for_counts(self, context, counts_DE):
        """A plan for one micro-batch, often with exact quotas."""
        plan = replace(self.drawn(context, *counts_DE.reshape(-1).tolist()), each_micro_batch=True)
        rng = np.random.default_rng(counts_DE.reshape(-1))
        if rng.random() < 0.3:
            return plan
        quotas = [
            rng.multinomial(load, here_D / here_D.sum())
            for load, here_D in zip(counts_DE.sum(axis=0), plan.placement.present_ED, strict=True)
        ]
        return replace(plan, tokens_ED=np.stack(quotas))


def strategy_of(case):
    """A real strategy where the case names one, otherwise random placements."""
    if case.placement in STRATEGIES:
        model = STRATEGIES[case.placement].settings
        return build_strategy(case.placement, model.model_validate(dict(case.settings)))
    return DrawnPlacements(case)
