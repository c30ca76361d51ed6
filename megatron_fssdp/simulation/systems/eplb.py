"""EPLB, DeepSeek's load balancer of expert parallelism (github.com/deepseek-ai/EPLB).

Shape letters: D devices, E experts, U slots of a device.
"""

from dataclasses import replace

import numpy as np

from megatron_fssdp.config.loading import setting
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.simulation.systems.eplb_planner import eplb_slots
from megatron_fssdp.strategies.flexmoe.flexmoe_settings import FlexmoeSettings
from megatron_fssdp.strategies.flexmoe.flexmoe_strategy import FlexmoeStrategy
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan


class EplbKeys(FlexmoeSettings):
    """Keys of ``eplb-like``: those of ``flexmoe``, whose ``slots`` are redundant experts, and one more."""

    num_groups: int = setting(1, "Groups of experts; placement is hierarchical if nodes divide them.", ge=1)


class EplbSystem(FlexmoeStrategy):
    """Places all copies of experts anew at an interval, by past loads; copies get equal parts of the pairs.

    Assumed, because EPLB serves inference and leaves statistics and interval open: both are ``flexmoe``'s,
    copies are trained as its resident replicas, and those that move take their optimizer states along.
    Unlike ``flexmoe``'s, copies of owners move, too, and a device can have two copies of one expert.
    """

    settings: EplbKeys

    def __init__(self, settings: EplbKeys) -> None:
        super().__init__(settings)
        self._copies_ED: dict[int, np.ndarray] = {}

    def check_sizes(self, num_experts: int, topology: Topology) -> None:
        """Refuse sizes that do not divide each other, by a ValueError."""
        super().check_sizes(num_experts, topology)
        devices, nodes, groups = topology.num_devices, topology.num_nodes, self.settings.num_groups
        if num_experts % devices or devices % nodes or num_experts % groups:
            raise ValueError(
                f"got {num_experts} experts in {groups} groups on {devices} devices of {nodes} nodes, wanted "
                "a multiple of the devices and of the groups, and equal nodes; change num_groups or the sizes"
            )

    def replicate(self, context: LayerContext, load_DE: np.ndarray) -> ExpertPlacement:
        """The placement for these loads. An expert's owner is the first device with a copy of it."""
        experts, devices = context.num_experts, context.num_devices
        slot_DU = eplb_slots(
            *(load_DE.sum(axis=0), devices),
            slots=experts // devices + self.resident_slots,
            num_nodes=context.topology.num_nodes,
            num_groups=self.settings.num_groups,
        )
        copies_ED = np.zeros((experts, devices), np.int64)
        np.add.at(copies_ED, (slot_DU, np.arange(devices)[:, None]), 1)
        self._copies_ED[context.layer] = copies_ED
        return ExpertPlacement((copies_ED > 0).argmax(axis=1), copies_ED > 0)

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """A plan with the present copies."""
        placement = context.placement
        transfer, ahead = two_level_transfer(placement, context.topology), self.settings.overlap
        return LayerPlan(placement, transfer, gather_ahead=ahead, resident=True, each_micro_batch=True)

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """The plan with each copy's part of this micro-batch's pairs."""
        copies_ED = self._copies_ED.get(context.layer, plan.placement.present_ED).cumsum(axis=1)
        ends_ED = counts_DE.sum(axis=0)[:, None] * copies_ED // copies_ED[:, -1:]
        return replace(plan, tokens_ED=np.diff(ends_ED, axis=1, prepend=0))
