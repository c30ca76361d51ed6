"""A runtime with one small layer whose experts are never computed."""

import numpy as np
import torch
import torch.distributed as dist

from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.execution.layer_executor import LayerExecutor
from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.strategy import Strategy


def one_layer(
    strategy: Strategy, num_experts: int, topology: Topology, rank: int
) -> tuple[MoERuntime, LayerExecutor]:
    """A measuring runtime over all ranks, and its layer."""
    runtime = MoERuntime(strategy, measure=True)
    owner_E = even_owners(num_experts, topology.num_devices)
    parameters = {
        int(e): [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
        for e in np.flatnonzero(owner_E == rank)
    }
    groups = ExpertGroups(dist.group.WORLD, topology)
    return runtime, runtime.add_layer(LayerContext(1, owner_E, topology), groups, parameters)
