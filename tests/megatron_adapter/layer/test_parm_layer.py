"""Layers under Parm's schedules equal a layer on one rank: outputs and all gradients in fp64.

The reference routes all tokens with whole weights, auxiliary losses included. Ranks of a tensor-parallel
group have the same tokens, or under sequence parallelism a part each.

"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_fssdp.config.strategy.shipped_settings import EpSettings, FssdpSettings
from megatron_fssdp.config.strategy.strategy_registry import register_strategy
from megatron_fssdp.strategies.fssdp import FssdpStrategy
from megatron_fssdp.testing.parallel_state import run_megatron_ranks

from .small_config import build_layer, moe_config

HIDDEN, EXPERTS, BATCH = 8, 8, 2
AUX, Z = 0.1, 0.01
TOLERANCE = 1e-10
SCHEDULED = "scheduled"


@dataclass(frozen=True)
class Case:
    """One layer: settings of the strategy and of the model."""

    settings: tuple[tuple[str, Any], ...]
    strategy: str = "parm"
    top_k: int = 2
    capacity: float | None = None  # Capacity factor; None drops nothing.
    pads: bool = False
    sequence_parallel: bool = False
    recompute: bool = False
    gated: bool = False  # SwiGLU.
    biases: bool = False  # Of experts and router; whole experts only.
    shared: int | None = None  # Width of a shared expert.
    overlaps: bool = False  # Whether it computes while rows travel.
    seq_length: int = 12


def cases() -> list[Case]:
    """All schedules with and without sequence parallelism, and each option with each schedule once."""
    found = []
    for schedule, is_split in product(("baseline", "megatron", "s1", "s2", "auto"), (False, True)):
        settings = (("schedule", schedule),)
        found += [
            Case(settings, sequence_parallel=is_split),
            Case(settings, sequence_parallel=is_split, top_k=1, gated=True),
            Case(settings, sequence_parallel=is_split, capacity=1.0),
            Case(settings, sequence_parallel=is_split, capacity=0.6, top_k=1, pads=True, recompute=True),
        ]
    found += [
        Case((("schedule", "s2"),), seq_length=9),
        Case((("schedule", "auto"),), seq_length=9),
        Case((("schedule", "s1"),), shared=12),
        Case((("schedule", "s2"),), shared=12),
        Case((("schedule", "baseline"),), shared=12),
        *(
            Case((("schedule", schedule),), shared=12, overlaps=True, sequence_parallel=is_split)
            for schedule, is_split in product(("baseline", "megatron", "s1", "s2"), (False, True))
        ),
        Case((("slots", 2),), strategy="fssdp", shared=12, overlaps=True, recompute=True),
        Case((("smart_schedule", True), ("group_size", 1)), strategy="ep", shared=12, overlaps=True),
        Case((("schedule", "s1"),), strategy="ep"),
        Case((("schedule", "s1"), ("slots", 2)), strategy=SCHEDULED),
        Case((("slots", 2),), strategy="fssdp", recompute=True),
        Case((("slots", 2), ("schedule", "s1")), strategy=SCHEDULED, sequence_parallel=True),
        Case((("smart_schedule", True), ("group_size", 1)), strategy="ep", recompute=True),
        Case((("schedule", "baseline"),), biases=True),
        Case((("schedule", "s1"),), biases=True),
        Case((("schedule", "s2"),), biases=True, gated=True),
    ]
    return found


# One of each schedule.
FIRST = [
    Case((("schedule", "baseline"),), shared=12, overlaps=True),
    Case((("schedule", "s1"),), capacity=1.0, gated=True),
    Case((("schedule", "s1"),), sequence_parallel=True, recompute=True),
    Case((("schedule", "s2"),), shared=12, recompute=True),
    Case((("schedule", "s2"),), capacity=0.6, top_k=1, pads=True),
    Case((("schedule", "s1"), ("slots", 2)), strategy=SCHEDULED, shared=12, overlaps=True),
]

# (tensor parallel, expert tensor parallel, expert parallel)
LAYOUTS = [
    (mp, esp, ep)
    for mp, esp, ep in product((1, 2, 4), repeat=3)
    if mp * esp * ep <= 8 and max(mp, esp * ep) > 1
]


def test_all_schedules_equal_one_rank() -> None:
    _check((2, 2, 2), FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_schedules_equal_one_rank_in_all_layouts(layout: tuple[int, int, int]) -> None:
    _check(layout, cases())


def _check(layout: tuple[int, int, int], cases: list[Case]) -> None:
    mp, esp, ep = layout
    world_size = max(mp, esp * ep)
    results = run_megatron_ranks(compare_cases, world_size, layout, cases, tp=mp, etp=esp, ep=ep)
    worst = {found[0][0]: max(error for _, error in found) for found in zip(*results, strict=True)}
    assert worst
    failed = {case: error for case, error in worst.items() if not error <= TOLERANCE}
    assert not failed, "\n".join(f"{error:.1e}: {case}" for case, error in failed.items())


def compare_cases(
    rank: int, world_size: int, layout: tuple[int, int, int], cases: list[Case]
) -> list[tuple[Case, float]]:
    """This rank's errors for all cases that the layout supports."""
    mp, esp, ep = layout
    register_scheduled()
    found = []
    for case in cases:
        if case.sequence_parallel and mp == 1:
            continue
        in_steps = ("smart_schedule", True) in case.settings
        if ((case.biases or in_steps) and esp > 1) or (in_steps and mp > 1 and not case.sequence_parallel):
            continue  # refused
        if case.biases and ep == 1:
            continue  # Megatron's own experts fail there.
        # Such small layers would not be cut into slices otherwise.
        least = patch("megatron_fssdp.planning.cost.tensor_schedules.LEAST_SLICE_BYTES", 0)
        with patch("torch.softmax", _in_full_precision), least:
            found.append((case, compare(rank, case)))
    return found


class ScheduledSettings(FssdpSettings, EpSettings):
    """Keys of replicas and of a schedule."""


def register_scheduled() -> None:
    """Make a strategy known with replicas under a given schedule, which `auto` selects by seconds."""
    register_strategy(
        SCHEDULED, settings=ScheduledSettings, strategy=FssdpStrategy, summary="replicas under a schedule"
    )


def test_auto_selects_a_schedule_for_each_new_shape() -> None:
    for schedules in run_megatron_ranks(decide_twice, 2, tp=2, ep=2, etp=1):
        assert schedules[0] in ("s1", "s2")
        assert schedules[1:] == ["s2", schedules[0]], (
            "nine tokens cannot be divided, and an earlier selection is kept"
        )


def decide_twice(rank: int, world_size: int) -> list[str]:
    """Schedules that a layer selects for twelve, nine and twelve tokens."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0, dtype=torch.float64))
    layer = build(Case((("schedule", "auto"),)))
    found = []
    for seq_length in (12, 9, 12):
        layer(torch.ones(seq_length, BATCH, HIDDEN, dtype=torch.float64))
        found.append(layer.slot_layer.load.schedule)
    return found


def _in_full_precision(x: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
    # Megatron's scores are fp32, whose rounding would hide other differences.
    return x.softmax(dim=dim)


def compare(rank: int, case: Case) -> float:
    """This rank's worst relative difference from the reference."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0, dtype=torch.float64))
    layer = build(case)
    n_mp = parallel_state.get_tensor_model_parallel_world_size()
    mp_rank = parallel_state.get_tensor_model_parallel_rank()
    dp, dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(11)
    worst = 0.0
    for _ in range(2):  # the second iteration's plans know the first one's loads
        shape = (dp, case.seq_length, BATCH, HIDDEN)
        tokens = torch.randn(shape, generator=generator, dtype=torch.float64)
        tokens[..., 0] += 1.0
        upstream = torch.randn(shape, generator=generator, dtype=torch.float64)
        own, own_upstream = tokens[dp_rank], upstream[dp_rank]
        if case.sequence_parallel:
            own, own_upstream = own.chunk(n_mp)[mp_rank], own_upstream.chunk(n_mp)[mp_rank]
        mine = own.clone().requires_grad_()
        layer.zero_grad()
        output, _ = layer(mine)
        divides = case.sequence_parallel or layer.slot_layer.load.schedule in ("s1", "megatron")
        output.backward(own_upstream)
        num_parts = n_mp if divides else 1
        wanted, gradient, router, experts, shared = reference(case, layer, tokens, upstream, num_parts)
        right, right_gradient = wanted[dp_rank], gradient[dp_rank]
        if case.sequence_parallel:
            right, right_gradient = right.chunk(n_mp)[mp_rank], right_gradient.chunk(n_mp)[mp_rank]
        pairs = [(output, right), (mine.grad, right_gradient)]
        pairs.append((total(layer.router.weight.grad, case, "router"), router))
        for expert, parameters in layer.slot_layer.experts.parameters.items():
            whole = [total(p.grad, case, "expert") for p in parameters]
            pairs += list(zip(whole, own_parts(experts[expert], case), strict=True))
        if shared is not None:
            pairs.append((total(layer.shared_experts.linear_fc2.weight.grad, case, "dense"), shared))
        worst = max(worst, *(relative(got, want) for got, want in pairs))
    return worst


def build(case: Case) -> Any:
    """A layer in fp64 with the same weights on all ranks that share them."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    torch.manual_seed(5)
    config = moe_config(
        parallel_state.get_expert_model_parallel_world_size(),
        HIDDEN,
        EXPERTS,
        num_attention_heads=4,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        sequence_parallel=case.sequence_parallel,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=AUX,
        moe_z_loss_coeff=Z,
        moe_router_topk=case.top_k,
        moe_router_pre_softmax=True,
        moe_router_dtype="fp64",
        moe_expert_capacity_factor=case.capacity,
        moe_pad_expert_input_to_capacity=case.pads,
        moe_shared_expert_intermediate_size=case.shared,
        moe_shared_expert_overlap=case.overlaps,
        add_bias_linear=case.biases,
        params_dtype=torch.float64,
        **({"activation_func": torch.nn.functional.silu, "gated_linear_unit": True} if case.gated else {}),
        **({"recompute_granularity": "selective", "recompute_modules": ["moe"]} if case.recompute else {}),
    )
    layer = build_layer(config, case.strategy, dict(case.settings))
    layer.train()
    group = parallel_state.get_expert_data_parallel_group()
    for parameters in layer.slot_layer.experts.parameters.values():
        for parameter in parameters:
            torch.nn.init.normal_(parameter, std=0.3)
            dist.broadcast(parameter.data, group=group, group_src=0)
    for parameter in layer.router.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        dist.broadcast(parameter.data, src=0)
    if case.shared is not None:
        for linear in (layer.shared_experts.linear_fc1, layer.shared_experts.linear_fc2):
            torch.nn.init.normal_(linear.weight, std=0.3)
            dist.broadcast(linear.weight.data, group=parallel_state.get_data_parallel_group(), group_src=0)
    return layer


def total(gradient: torch.Tensor | None, case: Case, kind: str) -> torch.Tensor:
    """A gradient as Megatron would complete it: summed over the ranks that have parts of it."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    assert gradient is not None
    gradient = gradient.clone()
    if kind == "expert":
        dist.all_reduce(gradient, group=parallel_state.get_expert_data_parallel_group())
        return gradient
    dist.all_reduce(gradient, group=parallel_state.get_data_parallel_group())
    if kind == "router" and case.sequence_parallel:
        dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
    return gradient


def own_parts(tensors: list[torch.Tensor], case: Case) -> list[torch.Tensor]:
    """This rank's part of whole fc1 and fc2."""
    from megatron.core import parallel_state

    size = parallel_state.get_expert_tensor_parallel_world_size()
    part = parallel_state.get_expert_tensor_parallel_rank()
    fc1, fc2, *biases = tensors
    halves = fc1.chunk(2 if case.gated else 1)
    return [torch.cat([half.chunk(size)[part] for half in halves]), fc2.chunk(size, dim=1)[part], *biases]


def whole_weights(layer: Any, case: Case) -> dict[int, list[torch.Tensor]]:
    """Every expert, assembled from all ranks' parts."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    part = parallel_state.get_expert_tensor_parallel_rank()
    own = {
        (e, part): [p.detach().clone() for p in parameters]
        for e, parameters in layer.slot_layer.experts.parameters.items()
    }
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    parts = {key: tensors for found in everyones for key, tensors in found.items()}
    size = parallel_state.get_expert_tensor_parallel_world_size()
    whole = {}
    for expert in range(EXPERTS):
        halves = [parts[expert, x][0].chunk(2 if case.gated else 1) for x in range(size)]
        fc1 = torch.cat([torch.cat([half[i] for half in halves]) for i in range(len(halves[0]))])
        fc2 = torch.cat([parts[expert, x][1] for x in range(size)], dim=1)
        whole[expert] = [w.requires_grad_() for w in (fc1, fc2, *parts[expert, 0][2:])]
    return whole


def reference(
    case: Case, layer: Any, tokens: torch.Tensor, upstream: torch.Tensor, num_parts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[int, list[torch.Tensor]], torch.Tensor | None]:
    """Output, its input's gradient, and those of router, experts and this rank's part of shared fc2.

    Args:
        case: What the layer is like.
        layer: The reference layer's parameters come from it.
        tokens: Tokens of every data-parallel group.
        upstream: The outputs' gradients.
        num_parts: Into how many parts tokens are cut for capacities.
    """
    inputs = tokens.clone().requires_grad_()
    router = layer.router.weight.detach().clone().requires_grad_()
    experts = whole_weights(layer, case)
    shared = shared_weights(layer, case)
    outputs, loss = [], torch.zeros((), dtype=torch.float64)
    for group in inputs:  # one data-parallel group after the other
        x = group.reshape(-1, HIDDEN)
        logits = x @ router.t() + (layer.router.bias.detach() if case.biases else 0)
        loss = loss + Z * torch.logsumexp(logits, dim=-1).square().mean()
        scores = logits.softmax(dim=-1)
        top, chosen = scores.topk(case.top_k, dim=-1)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        probs = torch.zeros_like(scores).scatter(1, chosen, top)
        counts = routing_map.sum(dim=0)
        loss = loss + AUX * EXPERTS * (scores.sum(dim=0) * counts).sum() / (len(x) ** 2 * case.top_k)
        if case.capacity is not None:
            kept = []
            for part in probs.detach().chunk(num_parts):
                capacity = math.ceil(case.capacity * len(part) * case.top_k / EXPERTS)
                index = part.topk(min(capacity, len(part)), dim=0).indices
                kept.append(torch.zeros_like(part, dtype=torch.bool).scatter(0, index, True))
            probs = probs * torch.cat(kept)
        out = torch.stack([network(case, x, *experts[e]) for e in range(EXPERTS)], dim=1)
        output = (probs[..., None] * out).sum(dim=1)
        if shared is not None:
            output = output + network(case, x, *shared)
        outputs.append(output.view_as(group))
    wanted = torch.stack(outputs)
    ((wanted * upstream).sum() + loss).backward()
    assert inputs.grad is not None
    assert router.grad is not None
    gradients = {e: [w.grad for w in tensors] for e, tensors in experts.items()}
    own_shared = None
    if shared is not None:
        from megatron.core import parallel_state

        size = parallel_state.get_tensor_model_parallel_world_size()
        own_shared = shared[1].grad.chunk(size, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
    return wanted.detach(), inputs.grad, router.grad, gradients, own_shared


def network(
    case: Case, x: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor, *biases: torch.Tensor
) -> torch.Tensor:
    """One whole feed-forward network."""
    inner = x @ fc1.t() + (biases[0] if biases else 0)
    last = biases[1] if biases else torch.zeros((), dtype=x.dtype)
    if case.gated:
        gate, linear = inner.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * linear @ fc2.t() + last
    return torch.nn.functional.gelu(inner) @ fc2.t() + last


def shared_weights(layer: Any, case: Case) -> list[torch.Tensor] | None:
    """The shared expert, whole."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if case.shared is None:
        return None
    own = [layer.shared_experts.linear_fc1.weight, layer.shared_experts.linear_fc2.weight]
    group = parallel_state.get_tensor_model_parallel_group()
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, [w.detach().clone() for w in own], group=group)
    return [torch.cat([found[i] for found in everyones], dim=i).requires_grad_() for i in range(len(own))]


def relative(got: torch.Tensor | None, wanted: torch.Tensor) -> float:
    """Largest difference relative to the largest value."""
    assert got is not None
    assert got.shape == wanted.shape, f"{tuple(got.shape)} instead of {tuple(wanted.shape)}"
    return float((got.detach() - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-12)
