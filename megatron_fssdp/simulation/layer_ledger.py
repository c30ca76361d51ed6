"""Records the decisions of a strategy and the resulting load of devices and links, for every iteration.

Shape letters: I iterations, L MoE layers, D devices, E experts.
"""

from dataclasses import dataclass, field, fields

import numpy as np

from megatron_fssdp.planning.cost.layer_traffic import (
    TransferTraffic,
)
from megatron_fssdp.planning.dispatch.token_dispatch import BusiestLinks, TokenDispatch
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.layer_plan import LayerPlan

_LINKS = tuple(field.name for field in fields(BusiestLinks))


class LinkColumns:
    """Units on the busiest links of every iteration and layer, float64 ``[I, L]`` for each kind of link."""

    def __init__(self, num_iterations: int, num_layers: int) -> None:
        self._values = {name: np.zeros((num_iterations, num_layers)) for name in _LINKS}

    def put(self, iteration: int, layer: int, busiest: BusiestLinks) -> None:
        """Write the entry of one iteration and layer."""
        for name in _LINKS:
            self._values[name][iteration, layer] = getattr(busiest, name)

    def busiest(self) -> BusiestLinks:
        """Return all entries. Each field is an array ``[I, L]``."""
        return BusiestLinks(**self._values)  # type: ignore[arg-type]


class TransferColumns:
    """Transfers of experts in every iteration and layer. Arrays are ``[I, L]``.

    Attributes:
        links: Experts on the busiest links.
        near_hops_IL: Number of hops inside nodes before the last hop.
        far_hops_IL: Number of hops between nodes before the last hop.
        num_hops_IL: Number of hops of the path with the most hops.
        num_experts_IL: Number of moved experts.
        num_between_nodes_IL: Number of moves between nodes.
    """

    def __init__(self, num_iterations: int, num_layers: int) -> None:
        shape = (num_iterations, num_layers)
        self.links = LinkColumns(*shape)
        self.near_hops_IL = np.zeros(shape, np.int64)
        self.far_hops_IL = np.zeros(shape, np.int64)
        self.num_hops_IL = np.zeros(shape, np.int64)
        self.num_experts_IL = np.zeros(shape, np.int64)
        self.num_between_nodes_IL = np.zeros(shape, np.int64)

    def put(self, iteration: int, layer: int, traffic: TransferTraffic) -> None:
        """Write the entry of one iteration and layer."""
        self.links.put(iteration, layer, traffic.busiest)
        self.near_hops_IL[iteration, layer], self.far_hops_IL[iteration, layer] = traffic.fill_hops
        self.num_hops_IL[iteration, layer] = traffic.num_hops
        self.num_experts_IL[iteration, layer] = traffic.num_experts
        self.num_between_nodes_IL[iteration, layer] = traffic.num_between_nodes

    def traffic(self) -> TransferTraffic:
        """All entries' busiest links and hops; the fields are arrays."""
        hops = (self.near_hops_IL, self.far_hops_IL)
        return TransferTraffic(self.links.busiest(), hops, self.num_hops_IL)  # type: ignore[arg-type]


@dataclass(eq=False)
class LayerLedger:
    """Decisions and traffic of every layer in every iteration.

    Attributes:
        num_iterations: Number of iterations, I.
        num_layers: Number of MoE layers, L.
        topology: Node of each device.
        tokens_ILD: int32 ``[I, L, D]``. (token, k) pairs that each device computes.
        dispatch: Pairs on the busiest links in one direction of the dispatch.
        most_routed_IL: int64 ``[I, L]``. Pairs of the source device that routes the most.
        cross_node_IL: int64 ``[I, L]``. Pairs that are sent to another node.
        gather: Experts that spAG materializes. spRS reduces them too, unless a plan after the gate differs.
        reduce: Experts whose gradients spRS reduces.
        addition: Experts that a plan after the gate adds.
        ahead_IL: bool ``[I, L]``. Whether spAG and spRS run beside the compute before the layer.
        rematerialize_IL: bool ``[I, L]``. Whether replicas are released between the passes.
        gather_early_IL: float64 ``[I, L]``. Share of spAG that runs at the same time as the experts of the
            layer before. 0 in the first layer.
        reduce_late_IL: float64 ``[I, L]``. Share of spRS that runs at the same time as their backward pass. 0
            in the first layer.
        each_pass_IL: bool ``[I, L]``. Whether replicas are planned and materialized for every micro-batch.
        resident_IL: bool ``[I, L]``. Whether replicas are resident, so that gradients are summed over all
            holders.
        in_steps_IL: bool ``[I, L]``. Whether the layer runs in the steps of the smart schedule.
        deduplicated_IL: bool ``[I, L]``. Whether tokens travel by the deduplicated exchange.
        exact_IL: bool ``[I, L]``. Whether the device shares tokens out by exact counts.
        replicas_IL: int64 ``[I, L]``. Number of replicas on all devices together.
        most_replicas_IL: int64 ``[I, L]``. Number of replicas on the device that has the most.
        most_owned_IL: int64 ``[I, L]``. Number of experts of the layer on the device that owns the most.
        reshard: Experts on the busiest links before each iteration, moved by a re-shard or for new resident
            replicas.
        reshard_experts_I: int64 ``[I]``. Number of experts that get a new owner or a new resident replica.
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
        self.resident_IL, self.in_steps_IL, self.deduplicated_IL = np.zeros((3, *shape), bool)
        self.exact_IL = np.zeros(shape, bool)
        self.gather_early_IL, self.reduce_late_IL = np.zeros((2, *shape))
        self.reshard = LinkColumns(self.num_iterations, 1)
        self.reshard_experts_I = np.zeros(self.num_iterations, np.int64)

    def put(
        self,
        iteration: int,
        layer: int,
        plan: LayerPlan,
        counts_DE: np.ndarray,
        dispatch: TokenDispatch,
        gather: TransferTraffic,
        reduce: TransferTraffic,
        addition: TransferTraffic,
    ) -> None:
        """Write the decisions and traffic of one layer in one iteration.

        Args:
            iteration: Index of the iteration.
            layer: Index of the layer.
            plan: Plan of the strategy.
            counts_DE: int64 ``[D, E]``. (token, k) pairs that each source device sends to each expert.
            dispatch: Traffic of the dispatch.
            gather: Traffic of spAG before the gate.
            reduce: Traffic of spRS.
            addition: Traffic of the spAG that a plan after the gate adds.
        """
        self.tokens_ILD[iteration, layer] = dispatch.whole_tokens_D
        self.most_routed_IL[iteration, layer] = counts_DE.sum(axis=1).max()
        self.dispatch.put(iteration, layer, dispatch.busiest)
        self.cross_node_IL[iteration, layer] = round(dispatch.cross_node_tokens)
        self.in_steps_IL[iteration, layer] = plan.in_steps
        self.deduplicated_IL[iteration, layer] = plan.deduplicated
        placement = plan.placement
        self.most_owned_IL[iteration, layer] = placement.owned_per_device_D.max()
        # A plan after the gate may have no replicas, although their gather has started.
        self.gather.put(iteration, layer, gather)
        if placement.num_replicas:
            self.reduce.put(iteration, layer, reduce)
            self.addition.put(iteration, layer, addition)
            self.replicas_IL[iteration, layer] = placement.num_replicas
            self.most_replicas_IL[iteration, layer] = placement.replicas_per_device_D.max()
        self.exact_IL[iteration, layer] = plan.shares_exactly
        self.ahead_IL[iteration, layer] = plan.gather_ahead
        self.rematerialize_IL[iteration, layer] = plan.rematerialize
        self.each_pass_IL[iteration, layer] = plan.each_micro_batch
        self.resident_IL[iteration, layer] = plan.resident
        if layer and plan.is_split:
            self.gather_early_IL[iteration, layer] = plan.split.gather
            self.reduce_late_IL[iteration, layer] = plan.split.reduce
