"""What strategies decided and what it puts on devices and links, iteration by iteration.

Shape letters: I iterations, L MoE layers, D devices.
"""

from dataclasses import dataclass, field, fields

import numpy as np

from megatron_fssdp.planning.cost.layer_traffic import (
    BusiestLinks,
    DispatchTraffic,
    TransferTraffic,
)
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.strategy import LayerPlan

_LINKS = tuple(field.name for field in fields(BusiestLinks))


class LinkColumns:
    """Busiest links of every iteration and layer, [I, L] each."""

    def __init__(self, num_iterations: int, num_layers: int) -> None:
        self._values = {name: np.zeros((num_iterations, num_layers)) for name in _LINKS}

    def put(self, iteration: int, layer: int, busiest: BusiestLinks) -> None:
        """Write one entry."""
        for name in _LINKS:
            self._values[name][iteration, layer] = getattr(busiest, name)

    def busiest(self) -> BusiestLinks:
        """All entries; the fields are arrays."""
        return BusiestLinks(**self._values)  # type: ignore[arg-type]


class TransferColumns:
    """Transfers of every iteration and layer, [I, L] each."""

    def __init__(self, num_iterations: int, num_layers: int) -> None:
        shape = (num_iterations, num_layers)
        self.links = LinkColumns(*shape)
        self.near_hops_IL = np.zeros(shape, np.int64)
        self.far_hops_IL = np.zeros(shape, np.int64)
        self.num_experts_IL = np.zeros(shape, np.int64)
        self.num_between_nodes_IL = np.zeros(shape, np.int64)

    def put(self, iteration: int, layer: int, traffic: TransferTraffic) -> None:
        """Write one entry."""
        self.links.put(iteration, layer, traffic.busiest)
        self.near_hops_IL[iteration, layer], self.far_hops_IL[iteration, layer] = traffic.fill_hops
        self.num_experts_IL[iteration, layer] = traffic.num_experts
        self.num_between_nodes_IL[iteration, layer] = traffic.num_between_nodes

    def traffic(self) -> TransferTraffic:
        """All entries' busiest links and hops; the fields are arrays."""
        hops = (self.near_hops_IL, self.far_hops_IL)
        return TransferTraffic(self.links.busiest(), hops)  # type: ignore[arg-type]


@dataclass(eq=False)
class LayerLedger:
    """What every layer does in every iteration.

    Attributes:
        topology: Nodes of the devices.
        tokens_ILD: (token, k) pairs that each device computes, int32.
        dispatch: Pairs on the busiest links in one direction of the dispatch.
        most_routed_IL: Pairs that the source with most tokens routes.
        cross_node_IL: Pairs sent to another node.
        gather: Experts that spAG brings, and spRS takes home unless there is an addition.
        reduce: Experts that spRS takes home.
        addition: Experts that calibration brings after the gate.
        ahead_IL: Whether spAG starts before the layer's compute.
        rematerialize_IL: Whether replicas are released between the passes.
        gather_early_IL: Share of spAG beside the experts of the layer before; 0 in the first layer.
        reduce_late_IL: Share of spRS beside their backward pass, likewise.
        each_pass_IL: Whether replicas are planned and brought for every micro-batch alone.
        resident_IL: Whether replicas stay, and gradients are summed among all holders.
        replicas_IL: Replicas on all devices together.
        most_replicas_IL: On the device that has most.
        most_owned_IL: Experts of the layer on the device that owns most.
        reshard: What re-sharding, or replicas that stay, move before each iteration: experts on the busiest
            links.
        reshard_experts_I: Experts whose device changes, or that get a replica that stays.
    """

    num_iterations: int
    num_layers: int
    topology: Topology
    tokens_ILD: np.ndarray = field(init=False)
    dispatch: LinkColumns = field(init=False)
    gather: TransferColumns = field(init=False)
    reduce: TransferColumns = field(init=False)
    addition: TransferColumns = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.num_iterations, self.num_layers)
        self.tokens_ILD = np.zeros((*shape, self.topology.num_devices), np.int32)
        self.dispatch = LinkColumns(*shape)
        self.gather, self.reduce, self.addition = (TransferColumns(*shape) for _ in range(3))
        self.most_routed_IL, self.cross_node_IL, self.replicas_IL = np.zeros((3, *shape), np.int64)
        self.most_replicas_IL, self.most_owned_IL = np.zeros((2, *shape), np.int64)
        self.ahead_IL, self.rematerialize_IL, self.each_pass_IL = np.zeros((3, *shape), bool)
        self.resident_IL = np.zeros(shape, bool)
        self.gather_early_IL, self.reduce_late_IL = np.zeros((2, *shape))
        self.reshard = LinkColumns(self.num_iterations, 1)
        self.reshard_experts_I = np.zeros(self.num_iterations, np.int64)

    def put(
        self,
        iteration: int,
        layer: int,
        plan: LayerPlan,
        counts_DE: np.ndarray,
        dispatch: DispatchTraffic,
        gather: TransferTraffic,
        reduce: TransferTraffic,
        addition: TransferTraffic,
    ) -> None:
        """Write what one layer does in one iteration."""
        self.tokens_ILD[iteration, layer] = dispatch.tokens_D
        self.most_routed_IL[iteration, layer] = counts_DE.sum(axis=1).max()
        self.dispatch.put(iteration, layer, dispatch.busiest)
        self.cross_node_IL[iteration, layer] = dispatch.cross_node
        placement = plan.placement
        self.most_owned_IL[iteration, layer] = placement.owned_per_device_D.max()
        if placement.num_replicas:
            self.gather.put(iteration, layer, gather)
            self.reduce.put(iteration, layer, reduce)
            self.addition.put(iteration, layer, addition)
            self.replicas_IL[iteration, layer] = placement.num_replicas
            self.most_replicas_IL[iteration, layer] = placement.replicas_per_device_D.max()
        # Resident replicas gather nothing, and their gradients are summed beside compute.
        self.ahead_IL[iteration, layer] = plan.gather_ahead or plan.resident
        self.rematerialize_IL[iteration, layer] = plan.rematerialize
        self.each_pass_IL[iteration, layer] = plan.each_micro_batch
        self.resident_IL[iteration, layer] = plan.resident
        if layer and plan.is_split:
            self.gather_early_IL[iteration, layer] = plan.split.gather
            self.reduce_late_IL[iteration, layer] = plan.split.reduce
