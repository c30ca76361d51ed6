"""One MoE layer of a strategy, compared with Megatron's own on the same ranks: output and all gradients.

Where tensor-parallel ranks have the same tokens, the reference is Megatron's layer under sequence
parallelism, which gets a part of the tokens on each rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_fssdp.megatron_adapter.layer import strategy_session
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.slots.gradient_totals import gradient_of

from ..adapters import make_shared_equal
from .small_config import build_layer, moe_config

TOKENS, HIDDEN, EXPERTS, SEED = 32, 16, 8, 5
REPLICAS = {"slots": 3, "overlap_degree": 4, "reshard_interval": 0}


@dataclass(frozen=True)
class Row:
    """One layer: options of its config, its strategy and the strategy's settings."""

    options: dict[str, Any]
    strategy: str = "fssdp"
    settings: dict[str, Any] = field(default_factory=lambda: REPLICAS)
    later: dict[str, Any] = field(default_factory=dict)  # of the config; a CPU lacks something for them
    fuses: bool = False  # whether the experts themselves add gradients to main_grad
    adapters: str = ""  # the host that has put them into the experts, which are frozen
    split: bool = True  # whether tensor-parallel ranks have different tokens
    replicates: bool = True
    nodes: tuple[int, ...] = ()  # of the expert-parallel ranks; detected if empty
    tokens: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()  # ranks whose tokens select no expert
    in_segments: bool = False  # as under the combined 1F1B schedule, see _run_segments
    kind: Callable[[type], type] | None = None  # makes a host's subclass of Megatron's layer
    in_slices: bool = True  # whether schedule s2 passes results on slice by slice (Parm's SAA)


@dataclass
class LayerComparison:
    """What one rank found in two passes."""

    error: float = 0.0  # the largest difference of a tensor, relative to its norm
    num_replicas: int = 0
    dispatcher: str = ""
    sent: tuple[int, int] = (0, 0)  # rows of the deduplicated exchange to other nodes, and in its last hop
    distinct: tuple[int, int] = (0, 0)  # pairs of a token and another node, and of a token and a device


def compare_rows(rank, rows):
    return {name: _compare(rank, row) for name, row in rows.items()}


def _compare(rank, row):
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0, dtype=row.options.get("params_dtype")))
    group, tp = ps.get_tensor_model_parallel_group(), ps.get_tensor_model_parallel_world_size()
    has_same = not row.split and tp > 1
    sees_all = "moe_expert_capacity_factor" in row.options and row.settings.get("schedule") == "s2"
    given = {"detect_topology": lambda *_: Topology(row.nodes)} if row.nodes else {}
    with patch.dict(vars(strategy_session), given):
        ours = _layer(row, row.split and tp > 1)
        if sees_all:  # Each rank drops among all tokens, which Megatron cannot do.
            stock = _layer(replace(row, settings={"schedule": "baseline"}), False)
        else:
            stock = _layer(row, tp > 1, is_stock=True)
    ours.load_state_dict(stock.state_dict())
    ours.config.overlap_moe_expert_parallel_comm = row.in_segments
    comparison, used, maps = LayerComparison(), [], []
    bind, remap = ours.slot_layer.passes.on_pass, ours.slot_layer.remap
    ours.slot_layer.passes.on_pass = lambda slot_pass: (used.append(slot_pass), bind(slot_pass))
    ours.slot_layer.remap = lambda *routing: maps.append(remap(*routing)) or maps[-1]
    for layer in (stock, ours) if rank in row.silent else ():
        layer.route = partial(_select_nothing, layer)
    # Replicas are planned by the counts of the pass, and by the loads of the first one. Others have no past.
    for step in range(2 if "slots" in row.settings else 1):
        seed = ps.get_data_parallel_rank() if has_same else rank
        generator = torch.Generator().manual_seed(10 * step + seed)
        num_tokens = row.tokens[rank] if row.tokens else TOKENS
        hidden, upstream = torch.randn(2, num_tokens, 1, HIDDEN, generator=generator)
        hidden, upstream = (x.to(ours.config.params_dtype) for x in (hidden, upstream))
        hidden[..., 0] += 2  # a common direction: some experts become hot
        has_parts = has_same and not sees_all
        own = [x.chunk(tp)[group.rank()] if has_parts else x for x in (hidden, upstream)]
        wanted, of_experts = _pass(stock, *own)
        got, experts = _pass(ours, hidden, upstream, in_segments=row.in_segments)
        if has_parts:  # The parts of output and input are those of the sequence; the router's are summands.
            parts = [[torch.empty_like(x) for _ in range(tp)] for x in wanted]
            for part, x in zip(parts, wanted, strict=True):
                dist.all_gather(part, x.contiguous(), group=group)
            wanted = [torch.cat(parts[0]), torch.cat(parts[1]), sum(parts[2], torch.zeros(()))]
        wanted += [of_experts[name] for name in sorted(of_experts)]
        got += [experts[name] for name in sorted(of_experts)]
        comparison.error = max(comparison.error, *(_relative(x, y) for x, y in zip(got, wanted, strict=True)))
    comparison.num_replicas = used[-1].plan.placement.num_replicas
    comparison.dispatcher = type(ours.token_dispatcher).__name__
    if comparison.dispatcher == "DeduplicatedTokenDispatcher":
        _count_rows(comparison, ours.token_dispatcher, maps[-1][0])
    return comparison


def _select_nothing(layer, *arguments):
    probs, routing_map = type(layer).route(layer, *arguments)
    return probs * 0, routing_map & False


def _count_rows(comparison, dispatcher, routing_map):
    node_D = dispatcher._topology.node_of_device_D
    hit_TD = routing_map.unflatten(1, (len(node_D), -1)).any(dim=2).numpy()
    is_far_D = node_D != node_D[dispatcher.ep_rank]
    nodes = sum(int(hit_TD[:, node_D == node].any(axis=1).sum()) for node in set(node_D[is_far_D]))
    sent_D = [np.array(sends) for sends, _ in dispatcher._splits]  # of each hop
    comparison.sent = int(sum(hop_D[is_far_D].sum() for hop_D in sent_D)), int(sent_D[-1].sum())
    comparison.distinct = nodes, int(hit_TD.sum())


def _layer(row, is_split, *, is_stock=False):
    sizes = {
        "tensor_model_parallel_size": ps.get_tensor_model_parallel_world_size(),
        "expert_tensor_parallel_size": ps.get_expert_tensor_parallel_world_size(),
        "sequence_parallel": is_split,
    }
    ep = ps.get_expert_model_parallel_world_size()
    config = moe_config(ep, HIDDEN, EXPERTS, **{"moe_router_topk": 2, **sizes, **row.options})
    for name, value in row.later.items():
        setattr(config, name, value)
    torch.manual_seed(SEED)
    how = {"fuses": row.fuses, "stock": is_stock, "adapters": row.adapters, "kind": row.kind}
    layer = build_layer(config, row.strategy, row.settings, **how)
    # Megatron starts with biases of zero, which would hide mistakes.
    torch.manual_seed(100 * ps.get_expert_model_parallel_rank() + ps.get_expert_tensor_parallel_rank())
    for parameter in layer.experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        if row.fuses and parameter.requires_grad:
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
            parameter.accumulation = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            parameter.accumulation.register_hook(lambda *_, weight=parameter: _add_to_main_grad(weight))
    make_shared_equal(layer.experts)
    return layer


def _add_to_main_grad(parameter):
    """As Megatron's DDP."""
    if not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad, parameter.grad_added_to_main_grad = None, False


def _pass(layer, hidden, upstream, *, in_segments=False):
    """Output, gradients of the input and of the router, and those of the experts over their copies."""
    layer.zero_grad()
    for parameter in layer.experts.parameters():
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.zero_()
    mine = hidden.clone().requires_grad_()
    runtime = layer._session.runtime if hasattr(layer, "slot_layer") else None
    if runtime is not None:
        runtime.begin_iteration(1)
    if in_segments:
        output = _run_segments(layer, mine, upstream)
    else:
        output, _ = layer(mine)
        output.backward(upstream)
    if runtime is not None:
        runtime.finish_gradients()
        runtime.end_passes()
        runtime.end_iteration()
    experts = {name: (p, gradient_of(p)) for name, p in layer.experts.named_parameters()}
    sums = {name: torch.zeros_like(p) if g is None else g.clone() for name, (p, g) in experts.items()}
    if getattr(layer, "shared_experts", None) is not None:
        sums["shared"] = layer.shared_experts.linear_fc2.weight.grad.clone()
    for name in sorted(sums):
        dist.all_reduce(sums[name], group=ps.get_expert_data_parallel_group())
    return [output.detach(), mine.grad, layer.router.weight.grad.clone()], sums


def _run_segments(layer, x, upstream):
    """Run the phases as Megatron's combined 1F1B schedule does: separate graphs, inputs that are freed."""
    graphs = []
    tensors = [x]
    for function, num_freed in (
        (lambda x: layer.preprocess(x, *layer.route(x)), 0),
        (layer.dispatch, 2),
        (lambda rows, probs: layer.routed_experts_compute(rows, probs)[:1], 1),
        (lambda rows: [layer.postprocess(layer.combine(rows), None)], 1),
    ):
        cut = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        outputs = list(function(*cut))
        for tensor in tensors[:num_freed]:
            tensor.untyped_storage().resize_(0)
        graphs.append((cut, outputs))
        tensors = outputs
    output, gradients = tensors[0].detach().clone(), [upstream]
    for cut, outputs in reversed(graphs):
        torch.autograd.backward(outputs, gradients)
        gradients = [tensor.grad for tensor in cut]
    x.grad = gradients[0]
    return output


def _relative(got, want):
    return float((got - want).norm() / want.norm().clamp_min(1e-3))
