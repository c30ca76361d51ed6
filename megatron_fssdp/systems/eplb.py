"""EPLB, DeepSeek's load balancer of expert parallelism (github.com/deepseek-ai/EPLB).

All copies of experts are placed anew, also those of owners, and a device may get two copies of one expert.
Sums and quotients are in float32, as there, so that ties are the same.

Shape letters: E experts, D devices, U slots of a device, B bins, P copies of experts.
"""

from dataclasses import replace

import numpy as np

from megatron_fssdp.config.loading import setting
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.flexmoe import FlexmoeSettings
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
        return self.plan_of(context.placement, context, resident=True, each_micro_batch=True)

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """The plan with each copy's part of this micro-batch's pairs."""
        copies_ED = self._copies_ED.get(context.layer, plan.placement.present_ED).cumsum(axis=1)
        ends_ED = counts_DE.sum(axis=0)[:, None] * copies_ED // copies_ED[:, -1:]
        return replace(plan, tokens_ED=np.diff(ends_ED, axis=1, prepend=0))


def eplb_slots(
    load_E: np.ndarray, num_devices: int, *, slots: int, num_nodes: int = 1, num_groups: int = 1
) -> np.ndarray:
    """The expert in each of the ``slots`` of each device, int64 ``[D, U]``, for loads ``[E]`` of experts.

    If the nodes divide the groups of consecutive experts, groups are packed to nodes first, and their experts
    are copied and packed to devices inside the node (hierarchical). Otherwise all nodes are one (global).
    The sizes divide each other, and there are at least as many slots as experts.
    """
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    loads_E, devices = np.asarray(load_E, np.float32), num_devices // num_nodes
    experts_of_group = np.arange(len(loads_E)).reshape(num_groups, -1)
    expert_DU = []
    for groups in _packed(loads_E[experts_of_group].sum(axis=1), num_nodes):
        expert_E = experts_of_group[groups].ravel()
        copy_P = _copied(loads_E[expert_E], devices * slots)
        per_copy_E = loads_E[expert_E] / np.bincount(copy_P).astype(np.float32)
        expert_DU += [expert_E[copy_P[items]] for items in _packed(per_copy_E[copy_P], devices)]
    return np.stack(expert_DU)


def _packed(weight_P: np.ndarray, num_bins: int) -> np.ndarray:
    """Items of equally full bins, int64 ``[B, P / B]``: the heaviest first, to the lightest bin with room."""
    room = len(weight_P) // num_bins
    if room == 1:
        return np.arange(num_bins)[:, None]
    weight_B, number_B = np.zeros(num_bins, np.float32), np.zeros(num_bins, np.int64)
    item_BP = np.empty((num_bins, room), np.int64)
    for item in np.argsort(-weight_P, kind="stable"):
        chosen = np.where(number_B < room, weight_B, np.inf).argmin()
        item_BP[chosen, number_B[chosen]] = item
        weight_B[chosen] += weight_P[item]
        number_B[chosen] += 1
    return item_BP


def _copied(load_E: np.ndarray, num_copies: int) -> np.ndarray:
    """The expert of each copy, int64 ``[P]``: all experts, then always the one whose copies have most."""
    copies_E, copy_P = np.ones(len(load_E), np.float32), np.arange(num_copies)
    for number in range(len(load_E), num_copies):
        copy_P[number] = (load_E / copies_E).argmax()
        copies_E[copy_P[number]] += 1
    return copy_P
