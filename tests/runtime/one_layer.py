"""A runtime with one small layer whose experts are never computed."""

import numpy as np
import torch
import torch.distributed as dist

from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.strategy import Strategy


def one_layer(
    strategy: Strategy, num_experts: int, topology: Topology, rank: int, shape: tuple[int, int] = (2, 2)
) -> tuple[MoERuntime, SlotLayer]:
    """A measuring runtime over all ranks, and its layer, whose experts have two matrices of this shape."""
    runtime = MoERuntime(strategy, measure=True)
    owner_E = even_owners(num_experts, topology.num_devices)
    parameters = {
        int(e): [torch.nn.Parameter(torch.ones(*shape)) for _ in range(2)]
        for e in np.flatnonzero(owner_E == rank)
    }
    groups = ExpertGroups(dist.group.WORLD, topology, dist.new_group())
    return runtime, runtime.add_layer(LayerContext(1, owner_E, topology), groups, parameters)
