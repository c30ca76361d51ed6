"""A Megatron MoE layer whose experts are in slots, compared with the stock layer on the same ranks."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_fssdp.planning.placement.topology import GroupRing, Topology
from megatron_fssdp.testing import DEFAULT_PRELOAD, run_megatron_ranks

from ..megatron_adapter.layer.small_config import moe_config

PRELOAD = (
    *DEFAULT_PRELOAD,
    "megatron_fssdp.megatron_adapter.cpu.cpu_runtime:install",
    "megatron.core.models.gpt.moe_module_specs",
    "pytest",
)
HIDDEN = 16
TOP1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
TOP4 = {"moe_router_topk": 4}
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
SHARED = {"moe_shared_expert_intermediate_size": 24}
OVERLAP = {**SHARED, "moe_shared_expert_overlap": True}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}


def run_layer_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, **sizes: int
) -> list[Any]:
    """Call a function on ranks that have Megatron's parallel state of these sizes."""
    return run_megatron_ranks(function, world_size, *arguments, preload=PRELOAD, **sizes)


@dataclass(frozen=True)
class SlotCase:
    """One setting of the layer.

    Attributes:
        config: Further settings of ``TransformerConfig``.
        nodes: Node of each expert-parallel rank.
        group_size: Ranks in a group of the smart schedule; ``None`` for the deduplicated exchange.
        own_last: Whether the rows of a rank's own group come last.
        tokens: Number of tokens of each rank.
        silent: Ranks whose tokens select no expert.
        replicas: Whether the last slot of each device has a replica. Otherwise it is empty.
        skew: Strength of a direction that all tokens have in common, so that some experts are hot.
        segments: Whether the phases are separate autograd graphs whose inputs are freed, as under
            Megatron's combined 1F1B schedule.
        recomputes_experts: Whether the experts' own forward pass is recomputed in the backward pass.
        most_choices: Option of the deduplicated exchange.
    """

    config: dict[str, Any] = field(default_factory=dict)
    nodes: tuple[int, ...] = (0, 0, 1, 1)
    group_size: int | None = None
    own_last: bool = False
    tokens: tuple[int, ...] = (12, 12, 12, 12)
    silent: tuple[int, ...] = ()
    replicas: bool = True
    skew: float = 0.3
    segments: bool = False
    recomputes_experts: bool = False
    most_choices: int | None = None


@dataclass
class SlotResult:
    """What one rank found in two micro-batches.

    Attributes:
        errors: Relative differences from the stock layer.
        num_calls: Forward passes of the experts in the smart schedule.
        num_awaited: Waits for weights in the smart schedule.
        sent: Rows that the deduplicated exchange sends to other nodes, and in its last hop.
        distinct: Pairs of a token and another node to which it goes, and pairs of a token and a device.
    """

    errors: dict[str, float] = field(default_factory=dict)
    num_calls: int = 0
    num_awaited: int = 0
    sent: tuple[int, int] = (0, 0)
    distinct: tuple[int, int] = (0, 0)

    def note(self, name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        assert got.shape == wanted.shape, name
        scale = float(wanted.abs().max()) or 1.0
        self.errors[name] = max(self.errors.get(name, 0.0), float((got - wanted).abs().max()) / scale)


def compare(rank: int, world_size: int, cases: dict[str, SlotCase]) -> dict[str, SlotResult]:
    """Run all cases and return the results by name."""
    return {name: _compare(rank, case) for name, case in cases.items()}


def _compare(rank: int, case: SlotCase) -> SlotResult:
    result = SlotResult()
    stock, ours, slots, expert_W = _layers(case, result)
    for micro in range(2):
        generator = torch.Generator().manual_seed(10 * rank + micro)
        x, upstream = torch.randn(2, case.tokens[rank], 1, HIDDEN, generator=generator)
        found = []
        for layer in (stock, ours):
            mine = (x + case.skew).to(stock.config.params_dtype).requires_grad_()
            run = _in_segments if case.segments and layer is ours else _whole
            found.append((run(layer, mine, upstream.to(mine.dtype)), mine.grad))
        for name, wanted, got in zip(("output", "input"), *found, strict=True):
            result.note(name, got, wanted)
    others = dict(ours.named_parameters())
    for name, wanted in stock.named_parameters():
        if ".local_experts." not in name:
            result.note(name, others[name].grad, wanted.grad)
    own = [[parameter.grad for parameter in mlp.parameters()] for mlp in slots.local_experts]
    gradients_W = [of_slot for of_rank in _gathered(own, stock.ep_group) for of_slot in of_rank]
    for expert, mlp in zip(stock.local_expert_indices, stock.experts.local_experts, strict=True):
        held = [gradients for e, gradients in zip(expert_W, gradients_W, strict=True) if e == expert]
        for (name, parameter), *parts in zip(mlp.named_parameters(), *held, strict=True):
            result.note(f"expert {name}", torch.stack(parts).sum(dim=0), parameter.grad)
    return result


def _gathered(mine: Any, group: Any) -> list[Any]:
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, mine, group=group)
    return everyones


def _layers(case: SlotCase, result: SlotResult) -> tuple[Any, Any, Any, list[int]]:
    """The stock layer, the layer over slots, its expert module with P slots, and each slot's expert or -1."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    groups = get_default_pg_collection()
    num_devices, device, tp = groups.ep.size(), groups.ep.rank(), groups.tp.size()
    options = {"num_experts": 8, "moe_router_topk": 2, **case.config}
    num_experts = options.pop("num_experts")
    sizes = {"tensor_model_parallel_size": tp, "expert_tensor_parallel_size": groups.expt_tp.size()}
    options |= {"num_attention_heads": 2, "sequence_parallel": tp > 1, **sizes}
    config = moe_config(num_devices, HIDDEN, num_experts, **options)
    model_parallel_cuda_manual_seed(7)
    spec = get_moe_module_spec(use_te=False, num_experts=num_experts, moe_grouped_gemm=False)
    stock, ours = (spec(config=config, pg_collection=groups) for _ in range(2))
    for layer in (stock, ours):
        if dist.get_rank() in case.silent:
            layer.route = partial(_select_nothing, layer)
        for name, parameter in layer.named_parameters():
            seed = sum(map(ord, name)) + 1000 * (dist.get_rank() + 1) * ("experts" in name)
            generator = torch.Generator().manual_seed(seed)
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    per_device, expert_W = num_experts // num_devices, []
    for d in range(num_devices):
        owned = range(d * per_device, (d + 1) * per_device)
        extra = (owned[0] + 2 * per_device + d) % num_experts
        expert_W += [*owned, extra if case.replicas and extra not in owned else -1]
    num_slots = per_device + 1
    theirs = copy.copy(config)
    theirs.num_moe_experts = num_devices * num_slots
    theirs.moe_pad_expert_input_to_capacity = False
    theirs.overlap_moe_expert_parallel_comm = case.segments
    slots = ours.submodules.experts(num_slots, theirs, pg_collection=groups)
    states = _gathered([mlp.state_dict() for mlp in stock.experts.local_experts], groups.ep)
    for mlp, expert in zip(slots.local_experts, expert_W[device * num_slots :], strict=False):
        if expert >= 0:
            mlp.load_state_dict(states[expert // per_device][expert % per_device])

    topology = Topology(case.nodes)
    remap = _remap(expert_W, topology, device, result)
    arguments = (num_slots, list(range(device * num_slots, (device + 1) * num_slots)), theirs, groups)
    from megatron_fssdp.dispatchers import deduplicated, smart_schedule

    if case.group_size is None:
        cls = _remapping(deduplicated.DeduplicatedTokenDispatcher, remap)
        dispatcher = cls(*arguments, topology=topology, most_choices=case.most_choices)
    else:
        cls = _remapping(smart_schedule.SmartScheduleTokenDispatcher, remap)
        dispatcher = cls(*arguments, ring=GroupRing.of(device, topology, case.group_size))
    if ours.shared_expert_overlap:
        dispatcher.set_shared_experts(ours.shared_experts)
    ours.token_dispatcher, ours.experts = dispatcher, _Experts(dispatcher, slots, case, result)
    return stock, ours, slots, expert_W


class _Experts(torch.nn.Module):
    """Stands in the layer for Megatron's expert module."""

    def __init__(self, dispatcher: Any, slots: Any, case: SlotCase, result: SlotResult) -> None:
        super().__init__()
        self.dispatcher, self.slots, self.case, self.result = dispatcher, slots, case, result

    def forward(self, rows: Any, counts: Any, probs: Any) -> Any:
        assert (counts.dtype, counts.device.type) == (torch.int64, "cpu")
        result, nodes = self.result, self.case.nodes
        if self.case.group_size is None:
            sent, here = [sends for sends, _ in self.dispatcher._splits], nodes[self.dispatcher.ep_rank]
            far = sum(n for sends in sent for node, n in zip(nodes, sends, strict=True) if node != here)
            result.sent = far, sum(sent[-1])
            return self.slots(rows, counts, probs)

        def run(*arguments: Any) -> Any:
            result.num_calls += 1
            return self.slots(*arguments)[0]

        def experts(*arguments: Any) -> Any:
            from megatron.core.tensor_parallel import checkpoint

            recomputes = self.case.recomputes_experts
            return checkpoint(run, False, *arguments) if recomputes else run(*arguments), None

        def wait() -> None:
            result.num_awaited += 1

        options = {"own_last": self.case.own_last, "await_weights": wait, "in_transfer": []}
        return self.dispatcher.compute_in_steps(rows, probs, experts, **options), None


def _remapping(cls: type, remap: Callable[..., Any]) -> type:
    class Remapping(cls):  # type: ignore[misc]
        def dispatch_preprocess(self, hidden: Any, routing_map: Any, probs: Any) -> Any:
            return super().dispatch_preprocess(hidden, *remap(routing_map, probs))

    return Remapping


def _remap(
    expert_W: Sequence[int], topology: Topology, device: int, result: SlotResult
) -> Callable[..., Any]:
    """The n-th token of an expert goes to its n-th slot in turn."""
    holders = [[w for w, e in enumerate(expert_W) if e == expert] for expert in range(max(expert_W) + 1)]
    table = torch.tensor([[held[n % len(held)] for held in holders] for n in range(12)])
    device_W = torch.arange(len(expert_W)) // (len(expert_W) // topology.num_devices)
    node_W = torch.tensor(topology.node_of_device)[device_W]

    def remap(routing_map: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slot_TE = table.gather(0, (routing_map.cumsum(0) - 1).clamp(min=0) % len(table))
        shape = len(routing_map), len(expert_W)
        physical = routing_map.new_zeros(shape).scatter_(1, slot_TE, routing_map)

        def distinct(place_W: torch.Tensor, places: Any) -> int:
            return sum(int(physical[:, place_W == place].any(1).sum()) for place in places)

        others = set(topology.node_of_device) - {topology.node_of_device[device]}
        result.distinct = distinct(node_W, others), distinct(device_W, range(topology.num_devices))
        return physical, probs.new_zeros(shape).scatter(1, slot_TE, probs)

    return remap


def _select_nothing(layer: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    probs, routing_map = type(layer).route(layer, *arguments)
    return probs * 0, routing_map & False


def _whole(layer: Any, x: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    output, _ = layer(x)
    output.backward(upstream)
    return output.detach()


def _in_segments(layer: Any, x: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """Run the phases as Megatron's combined 1F1B schedule does: separate graphs, inputs that are freed."""
    graphs: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
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
