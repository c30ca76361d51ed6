"""A layer under Parm's orders of collectives, on the CPU or on a virtual device.

Two devices share their experts between two ranks each (expert tensor parallelism), which are also
tensor-parallel: both ranks of a pair hold the same tokens.
"""

from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.rows.model_parallel import gather_tokens, split_tokens
from megatron_fssdp.config.strategy.strategy_settings import EpSettings
from megatron_fssdp.planning.cost.tensor_schedules import Schedule
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.exchange.exchange_selection import exchange_of
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.execution.layer_pass import run_layer
from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime
from megatron_fssdp.runtime.experts.grouped_ffn import grouped_ffn
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.registry import build_strategy

from .layer_case import ACTIVATIONS

TOKENS, MODEL_DIM, FFN_DIM, EXPERTS = 16, 8, 16, 4
PEERS = 2


def parm_groups(rank: int, world_size: int) -> ExpertGroups:
    """Process groups of this rank: two devices of two peers."""
    device = rank // PEERS
    by_peer = [dist.new_group(list(range(x, world_size, PEERS))) for x in range(PEERS)]
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size, PEERS)]
    return ExpertGroups(
        by_peer[rank % PEERS],
        Topology.uniform(world_size // PEERS, 1),
        expert_tensor_parallel=pairs[device],
        parts=dist.new_group(list(range(world_size))),
        tensor_parallel=pairs[device],
        devices_of_peers=(device,) * PEERS,
    )


def run_parm_layer(
    rank: int, schedule: Schedule, groups: ExpertGroups, dtype: torch.dtype, device: str
) -> list[Tensor]:
    """Output, and gradients of hidden states, probabilities and parameters, on the CPU."""
    owner_E = even_owners(EXPERTS, 2)
    generator = torch.Generator().manual_seed(rank // PEERS)  # Both ranks of a pair draw the same numbers.

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    parameters = {
        int(e): [torch.nn.Parameter(drawn(*shape)) for shape in ((FFN_DIM, MODEL_DIM), (MODEL_DIM, FFN_DIM))]
        for e in np.flatnonzero(owner_E == rank // PEERS)
    }
    executor = MoERuntime(build_strategy("ep", EpSettings())).add_layer(
        LayerContext(1, owner_E, groups.topology), groups, parameters
    )
    leaf = drawn(TOKENS, MODEL_DIM).requires_grad_()
    leaf_probs = torch.rand(TOKENS, EXPERTS, generator=generator).to(device).requires_grad_()
    routing_map = (torch.rand(TOKENS, EXPERTS, generator=generator) < 0.4).to(device)
    hidden, probs = leaf, leaf_probs
    divides, peers = schedule in ("s1", "megatron"), groups.tensor_parallel
    assert peers is not None
    if divides:
        hidden, probs = split_tokens(hidden, peers), split_tokens(probs, peers)
        routing_map = routing_map.chunk(PEERS)[peers.rank()]
    output, _ = run_layer(
        executor,
        hidden,
        probs,
        routing_map,
        partial(grouped_ffn, activation=ACTIVATIONS["gelu"]),
        exchange=exchange_of(schedule, groups),
    )
    if divides:
        output = gather_tokens(output, peers)
    output.float().square().sum().backward()
    gradients = [leaf.grad, leaf_probs.grad]
    gradients += [parameter.grad for tensors in parameters.values() for parameter in tensors]
    return [output.detach().cpu(), *(gradient.cpu() for gradient in gradients if gradient is not None)]
