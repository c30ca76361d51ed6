"""A Megatron MoE layer whose experts are in slots, compared with the stock layer on the same ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_fssdp.planning.placement.group_ring import GroupRing
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.testing.parallel_state import megatron_parallel_state
from megatron_fssdp.testing.ranks import DEFAULT_PRELOAD, run_ranks

from ..megatron_adapter.layer.small_config import moe_config

HIDDEN, EXPERTS = 16, 8
SHARED = {"moe_shared_expert_intermediate_size": 24}
OVERLAP = {**SHARED, "moe_shared_expert_overlap": True}
PRELOAD = (
    *DEFAULT_PRELOAD,
    "megatron_fssdp.megatron_adapter.cpu.cpu_runtime:install",
    "megatron.core.models.gpt.moe_module_specs",
    "pytest",
)
TOP1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def run_layer_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, **sizes: int
) -> list[Any]:
    """Call a function on ranks that have Megatron's parallel state of these sizes."""
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    context = {"context": megatron_parallel_state, "context_options": sizes}
    return run_ranks(function, world_size, *arguments, env=environment, preload=PRELOAD, **context)


@dataclass(frozen=True)
class SlotCase:
    """One setting of the layer.

    Attributes:
        nodes: Node of each expert-parallel rank.
        group_size: Ranks in a group of the smart schedule; ``None`` for the deduplicated exchange.
        own_last: Whether the rows of a rank's own group come last.
        config: Further settings of ``TransformerConfig``.
        tokens: Number of tokens of each rank.
        silent: Ranks whose tokens select no expert.
        replicas: Whether the last slot of each device has a replica. Otherwise it is empty.
        skew: Strength of a direction that all tokens have in common, so that some experts are hot.
        segments: Whether the phases are separate autograd graphs whose inputs are freed, as under
            Megatron's combined 1F1B schedule.
        options: Further options of the dispatcher.
    """

    nodes: tuple[int, ...] = (0, 0, 1, 1)
    group_size: int | None = None
    own_last: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = (12, 12, 12, 12)
    silent: tuple[int, ...] = ()
    replicas: bool = True
    skew: float = 0.3
    segments: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SlotResult:
    """What one rank found in two micro-batches.

    Attributes:
        errors: Relative differences from the stock layer.
        num_calls: Forward passes of the experts in the smart schedule.
        num_awaited: Waits for weights in the smart schedule.
        sent: Rows that the deduplicated exchange sends to other nodes, and in its last hop, in the last
            micro-batch.
        distinct: Pairs of a token and another node to which it goes, and pairs of a token and a device.
    """

    errors: dict[str, float]
    num_calls: int
    num_awaited: int
    sent: tuple[int, int]
    distinct: tuple[int, int]


def compare(rank: int, world_size: int, cases: dict[str, SlotCase]) -> dict[str, SlotResult]:
    """Run all cases and return the results by name."""
    return {name: _compare(rank, case) for name, case in cases.items()}


def _compare(rank: int, case: SlotCase) -> SlotResult:
    stock, ours, slots, facts = layers(case)
    errors: dict[str, float] = {}

    def note(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        assert got.shape == wanted.shape, name
        scale = wanted.abs().max().item() if wanted.numel() else 0.0
        difference = (got - wanted).abs().max().item() if wanted.numel() else 0.0
        errors[name] = max(errors.get(name, 0.0), difference / (scale or 1.0))

    dtype = stock.config.params_dtype
    for micro in range(2):
        generator = torch.Generator().manual_seed(10 * rank + micro)
        x = torch.randn(case.tokens[rank], 1, HIDDEN, generator=generator) + case.skew
        upstream = torch.randn(x.shape, generator=generator)
        found = []
        for layer in (stock, ours):
            mine = x.to(dtype).requires_grad_()
            run = in_segments if case.segments and layer is ours else _whole
            found.append((run(layer, mine, upstream.to(dtype)), mine.grad))
        note("output", found[1][0], found[0][0])
        note("input", found[1][1], found[0][1])
    for (name, wanted), got in zip(stock.named_parameters(), ours.stock_parameters, strict=True):
        if ".local_experts." not in name:
            note(name, got.grad, wanted.grad)
    for local, wanted in enumerate(stock.experts.local_experts):
        expert = stock.local_expert_indices[local]
        sums = [torch.zeros_like(parameter) for parameter in wanted.parameters()]
        for sum_, parts in zip(
            sums, zip(*_gradients_of(slots, expert, facts, stock), strict=True), strict=True
        ):
            sum_ += sum(parts)
        for sum_, (name, parameter) in zip(sums, wanted.named_parameters(), strict=True):
            note(f"expert {name}", sum_, parameter.grad)
    return SlotResult(errors, *(facts[x] for x in ("calls", "awaited", "sent", "distinct")))


def _gradients_of(slots: Any, expert: int, facts: dict[str, Any], layer: Any) -> list[list[torch.Tensor]]:
    """Gradients of all slots that hold an expert, from all ranks of the expert-parallel group."""
    if "gathered" not in facts:
        everyones: list[Any] = [None] * layer.ep_group.size()
        own = [[p.grad for p in body.parameters()] for body in slots.local_experts]
        dist.all_gather_object(everyones, own, group=layer.ep_group)
        facts["gathered"] = [of_slot for own in everyones for of_slot in own]
    held = [w for w, e in enumerate(facts["expert_W"]) if e == expert]
    empty = [w for w, e in enumerate(facts["expert_W"]) if e < 0]
    assert all(not g.any() for w in empty for g in facts["gathered"][w])
    return [facts["gathered"][w] for w in held]


def layers(case: SlotCase) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The stock layer, the layer over slots, its expert module with P slots, and a record of facts."""
    import copy

    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    groups = get_default_pg_collection()
    num_devices, device, parts = groups.ep.size(), groups.ep.rank(), groups.expt_tp.size()
    options = {"num_experts": EXPERTS, "moe_router_topk": 2, **case.config}
    config = moe_config(
        num_devices,
        HIDDEN,
        options.pop("num_experts"),
        num_attention_heads=2,
        tensor_model_parallel_size=groups.tp.size(),
        expert_tensor_parallel_size=parts,
        sequence_parallel=groups.tp.size() > 1,
        **options,
    )
    model_parallel_cuda_manual_seed(7)
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    stock, ours = (spec(config=config, pg_collection=groups) for _ in range(2))
    for layer in (stock, ours):
        if dist.get_rank() in case.silent:
            layer.route = partial(_select_nothing, layer)
        for name, parameter in layer.named_parameters():
            seed = sum(map(ord, name)) + 1000 * (dist.get_rank() + 1) * ("experts" in name)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    per_device = config.num_moe_experts // num_devices
    owned = [list(range(d * per_device, (d + 1) * per_device)) for d in range(num_devices)]
    extra = [(owned[d][0] + 2 * per_device + d) % config.num_moe_experts for d in range(num_devices)]
    expert_W = [
        e
        for d in range(num_devices)
        for e in [*owned[d], extra[d] if case.replicas and extra[d] not in owned[d] else -1]
    ]
    num_slots = per_device + 1
    theirs = copy.copy(config)
    theirs.num_moe_experts = num_devices * num_slots
    theirs.moe_pad_expert_input_to_capacity = False
    theirs.overlap_moe_expert_parallel_comm = case.segments
    slots = ours.submodules.experts(num_slots, theirs, pg_collection=groups)
    everyones: list[Any] = [None] * num_devices
    dist.all_gather_object(
        everyones, [mlp.state_dict() for mlp in stock.experts.local_experts], group=groups.ep
    )
    for mlp, expert in zip(slots.local_experts, expert_W[device * num_slots :], strict=False):
        if expert >= 0:
            mlp.load_state_dict(everyones[expert // per_device][expert % per_device])

    facts: dict[str, Any] = {
        "expert_W": expert_W,
        "calls": 0,
        "awaited": 0,
        "sent": (0, 0),
        "distinct": (0, 0),
    }
    topology = Topology(case.nodes)
    remap = _remap(expert_W, config.num_moe_experts, facts, topology, device, num_slots)
    arguments = (num_slots, list(range(device * num_slots, (device + 1) * num_slots)), theirs, groups)
    if case.group_size is None:
        from megatron_fssdp.dispatchers.deduplicated import DeduplicatedTokenDispatcher

        dispatcher = remapping(DeduplicatedTokenDispatcher, remap)(
            *arguments, topology=topology, **case.options
        )
    else:
        from megatron_fssdp.dispatchers.smart_schedule import SmartScheduleTokenDispatcher

        ring = GroupRing.of(device, topology, case.group_size)
        dispatcher = remapping(SmartScheduleTokenDispatcher, remap)(*arguments, ring=ring)
    if ours.shared_expert_overlap:
        dispatcher.set_shared_experts(ours.shared_experts)
    ours.stock_parameters = list(ours.parameters())
    ours.token_dispatcher, ours.experts = dispatcher, _Experts(dispatcher, slots, case, facts)
    return stock, ours, slots, facts


class _Experts(torch.nn.Module):
    """Stands in the layer for Megatron's expert module."""

    def __init__(self, dispatcher: Any, slots: Any, case: SlotCase, facts: dict[str, Any]) -> None:
        super().__init__()
        self.dispatcher, self.slots, self.case, self.facts = dispatcher, slots, case, facts

    def forward(self, rows: Any, counts: Any, probs: Any) -> Any:
        assert counts.dtype == torch.int64
        assert counts.device.type == "cpu"
        if self.case.group_size is None:
            assert counts.sum() == len(rows)
            splits, device = self.dispatcher._splits, self.dispatcher.ep_rank
            nodes, sent = self.case.nodes, [sends for sends, _ in splits]
            far = sum(n for s in sent for d, n in enumerate(s) if nodes[d] != nodes[device])
            self.facts["sent"] = (far, sum(sent[-1]))
            return self.slots(rows, counts, probs)

        def experts(*arguments: Any) -> Any:
            self.facts["calls"] += 1
            return self.slots(*arguments)

        def wait() -> None:
            self.facts["awaited"] += 1

        options = {"own_last": self.case.own_last, "await_weights": wait, "in_transfer": []}
        return self.dispatcher.compute_in_steps(rows, probs, experts, **options), None


def remapping(cls: type, remap: Callable[..., Any]) -> type:
    """A dispatcher class that first remaps the routing to slots."""

    class Remapping(cls):  # type: ignore[misc]
        def dispatch_preprocess(self, hidden: Any, routing_map: Any, probs: Any) -> Any:
            return super().dispatch_preprocess(hidden, *remap(routing_map, probs))

    return Remapping


def _remap(
    expert_W: Sequence[int],
    num_experts: int,
    facts: dict[str, Any],
    topology: Topology,
    device: int,
    num_slots: int,
) -> Callable[..., Any]:
    """The n-th token of an expert goes to its n-th slot in turn."""
    holders = [[w for w, e in enumerate(expert_W) if e == expert] for expert in range(num_experts)]
    table = torch.tensor([[held[n % len(held)] for held in holders] for n in range(12)])
    device_W = torch.arange(len(expert_W)) // num_slots
    node_W = torch.tensor(topology.node_of_device)[device_W]

    def remap(routing_map: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slot_TE = table.gather(0, (routing_map.cumsum(0) - 1).clamp(min=0) % len(table))
        shape = len(routing_map), len(expert_W)
        physical = routing_map.new_zeros(shape).scatter_(1, slot_TE, routing_map)

        def distinct(place_W: torch.Tensor, places: Any) -> int:
            return sum(int(physical[:, place_W == place].any(1).sum()) for place in places)

        others = set(topology.node_of_device) - {topology.node_of_device[device]}
        facts["distinct"] = (distinct(node_W, others), distinct(device_W, range(topology.num_devices)))
        return physical, probs.new_zeros(shape).scatter(1, slot_TE, probs)

    return remap


def _select_nothing(layer: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    probs, routing_map = type(layer).route(layer, *arguments)
    return probs * 0, routing_map & False


def _whole(layer: Any, x: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    output, _ = layer(x)
    output.backward(upstream)
    return output.detach()


def in_segments(layer: Any, x: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """Run the phases as Megatron's combined 1F1B schedule does: separate graphs, inputs that are freed."""
    graphs: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def segment(function: Callable[..., Any], inputs: list[torch.Tensor], num_freed: int) -> Any:
        cut = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
        outputs = function(*cut)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        for tensor in inputs[:num_freed]:
            tensor.untyped_storage().resize_(0)
        graphs.append((cut, outputs))
        return outputs

    def before(x: torch.Tensor) -> Any:
        probs, routing_map = layer.route(x)
        return layer.preprocess(x, probs, routing_map)

    rows = segment(before, [x], 0)
    rows = segment(layer.dispatch, rows, 2)
    rows = segment(lambda *inputs: layer.routed_experts_compute(*inputs)[0], rows, 1)
    rows = segment(lambda rows: layer.postprocess(layer.combine(rows), None), rows, 1)
    output, gradients = rows[0].detach().clone(), [upstream]
    for cut, outputs in reversed(graphs):
        torch.autograd.backward(outputs, gradients)
        gradients = [tensor.grad for tensor in cut]
    x.grad = gradients[0]
    return output
