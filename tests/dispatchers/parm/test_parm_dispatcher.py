"""Megatron's MoE layer with Parm's dispatcher equals the layer with Megatron's own: output and all gradients.

The reference is Megatron's layer under sequence parallelism. Layers without it get all tokens of their
tensor-parallel ranks on each of these ranks; their results then equal the gathered ones of the reference.
"""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.testing.parallel_state import run_megatron_ranks

from ...megatron_adapter.layer.small_config import moe_config

HIDDEN, SLOTS, SEQUENCE, BATCH = 8, 8, 12, 2
TOLERANCE = 1e-6  # Megatron's softmax is fp32, everything else fp64.


@dataclass(frozen=True)
class Case:
    """One layer.

    Attributes:
        schedule: Setting of the selector.
        split: Whether tensor-parallel ranks have different tokens (sequence parallelism).
        simultaneous: Whether S2 uses SAA.
        top_k: Experts of a token.
        capacity: Capacity factor; None drops nothing.
        shared: Whether there is a shared expert.
        overlaps: Whether the shared expert computes while rows travel.
        recompute: Whether the layer is recomputed in the backward pass.
        copies: Whether slots w and w + 4 have equal weights, and every other token uses the other one.
    """

    schedule: str
    split: bool = False
    simultaneous: bool = True
    top_k: int = 2
    capacity: float | None = None
    shared: bool = False
    overlaps: bool = False
    recompute: bool = False
    copies: bool = False


CASES = [
    *(Case(schedule, split) for schedule in ("baseline", "megatron", "s1", "s2") for split in (False, True)),
    *(Case(schedule, top_k=1, shared=True) for schedule in ("baseline", "megatron", "s1", "s2")),
    *(Case(schedule, overlaps=True, shared=True) for schedule in ("baseline", "megatron", "s1", "s2")),
    *(Case(schedule, True, overlaps=True, shared=True) for schedule in ("baseline", "s1")),
    *(Case(schedule, copies=True, top_k=1) for schedule in ("baseline", "megatron", "s1", "s2")),
    Case("s1", True, top_k=1, recompute=True),
    Case("s2", recompute=True),
    Case("s2", simultaneous=False),
    Case("s1", capacity=1.0),
    Case("megatron", capacity=1.0),
    Case("s1", True, capacity=0.6),
    Case("auto"),
    Case("auto", True),
]


# Experts of two parts; peers in several expert-parallel groups; a single device; no peers.
LAYOUTS = [(2, 2, 2), (4, 1, 2), (2, 1, 1), (1, 2, 2)]
MORE_LAYOUTS = [(2, 1, 2), (2, 1, 4), (4, 2, 2), (2, 4, 1), (2, 2, 4)]


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(x, marks=pytest.mark.slow) for x in MORE_LAYOUTS)], ids=str
)
def test_output_and_gradients_equal_megatrons(layout: tuple[int, int, int]) -> None:
    tp, etp, ep = layout
    results = run_megatron_ranks(compare_cases, max(tp, etp * ep), tp=tp, etp=etp, ep=ep)
    assert len(results[0]) > 5
    worst = {case: max(found[case] for found in results) for case in results[0]}
    failed = {case: error for case, error in worst.items() if not error <= TOLERANCE}
    assert not failed, "\n".join(f"{error:.1e}: {case}" for case, error in failed.items())


def test_auto_selects_alike_on_all_ranks_and_keeps_its_selection() -> None:
    found = run_megatron_ranks(select, 4, tp=2, etp=2, ep=2)
    assert all(one == found[0] for one in found)
    measured, odd, again, given, costs = found[0]
    assert measured in ("s1", "s2", "megatron")
    assert odd == "s2", "nine tokens cannot be divided"
    assert again == measured
    assert given == "s2", "the given costs make all but s2 slow"
    assert costs["s2"] < costs["s1"] < costs["megatron"]


def select(rank: int, world_size: int) -> list[Any]:
    """Schedules for twelve, nine and twelve tokens by measured costs, and for twelve by given costs."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megatron_fssdp.planning.cost.cost_model import LinkCost

    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0, dtype=torch.float64))
    layer = build(Case("auto"), split=False)
    dispatcher, found = use_parm(layer, Case("auto")), []
    for length in (12, 9, 12):
        layer(torch.ones(length, BATCH, HIDDEN, dtype=torch.float64))
        found.append(dispatcher.schedule)
    seconds = {
        ("all_to_all", "ep_esp"): 2.0,
        ("all_to_all", "ep"): 9.0,
        ("all_gather", "esp"): 1.0,
        ("reduce_scatter", "esp"): 1.0,
        ("all_gather", "mp"): 1.0,
        ("overlapped_all_to_all", "ep_esp"): 0.5,
    }
    costs = {name: LinkCost(alpha_s, 0.0) for name, alpha_s in seconds.items()}
    dispatcher = use_parm(layer, Case("auto"), find_costs=lambda layer, like: costs)
    layer(torch.ones(12, BATCH, HIDDEN, dtype=torch.float64))
    return [*found, dispatcher.schedule, dispatcher.predicted_s]


def test_wrong_use_is_refused() -> None:
    for messages in run_megatron_ranks(refusals, 2, tp=2, ep=2, etp=1):
        undivided, odd, padded, graph = messages
        assert undivided.startswith("schedule s1: got 24 of 24 tokens, wanted one part of 2; route with")
        assert odd.startswith("schedule s1: got sequences of 9 tokens, wanted a multiple of the 2")
        assert padded.startswith("schedule s2: got moe_router_padding_for_quantization")
        assert "CUDA graph of moe_preprocess" in graph


def refusals(rank: int, world_size: int) -> list[str]:
    """Messages of errors."""
    found = []
    for schedule, length, option in (
        ("s1", 12, None),
        ("s1", 9, None),
        ("s2", 12, ("moe_router_padding_for_quantization", True)),
        ("s1", 12, ("cuda_graph_modules", ["moe_preprocess"])),
    ):
        layer = build(Case(schedule), split=False)
        route = layer.route
        if option is not None:
            setattr(layer.config, *option)
            layer.config.cuda_graph_impl = "transformer_engine"
        try:
            use_parm(layer, Case(schedule))
            if length == 12 and option is None:
                layer.route, layer.preprocess = route, type(layer).preprocess.__get__(layer)
            layer(torch.ones(length, BATCH, HIDDEN, dtype=torch.float64))
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
    return found


def compare_cases(rank: int, world_size: int) -> dict[Case, float]:
    """This rank's errors for all cases that the layout has."""
    from megatron.core import parallel_state

    with patch("megatron_fssdp.planning.cost.tensor_schedules.LEAST_SLICE_BYTES", 0):
        if parallel_state.get_tensor_model_parallel_world_size() == 1:
            # Sequence parallelism needs tensor parallelism; all ranks have different tokens anyway.
            return {case: compare(case) for case in CASES if not case.split and not case.recompute}
        return {case: compare(case) for case in CASES}


def compare(case: Case) -> float:
    """This rank's largest relative error."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0, dtype=torch.float64))
    group = parallel_state.get_tensor_model_parallel_group()
    generator = torch.Generator().manual_seed(3 + parallel_state.get_data_parallel_rank())
    draw = [torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).double() for _ in range(2)]
    draw[0][..., 0] += 1.0  # Some slots get more tokens.
    parts = [x.chunk(group.size())[group.rank()].contiguous() for x in draw]

    reference = build(case, split=group.size() > 1)
    wanted = run(case, reference, *parts)
    tested = reference
    if group.size() > 1 and not case.split:
        tested = build(case, split=False)
        tested.load_state_dict(reference.state_dict())
        wanted = [gathered(x, group) for x in wanted[:2]] + wanted[2:]
        parts = draw
    dispatcher = use_parm(tested, case)
    found = run(case, tested, *parts)
    assert found[0].abs().max() > 0.1
    assert dispatcher.schedule == case.schedule or case.schedule == "auto"
    return max(relative(*pair) for pair in zip(found, wanted, strict=True))


def build(case: Case, *, split: bool) -> Any:
    """Megatron's layer in fp64, with the same weights on all ranks that share them."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    torch.manual_seed(5)
    config = moe_config(
        parallel_state.get_expert_model_parallel_world_size(),
        HIDDEN,
        SLOTS,
        num_attention_heads=4,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        sequence_parallel=split,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.0 if case.copies else 0.1,
        moe_z_loss_coeff=0.01,
        moe_router_topk=case.top_k,
        moe_router_pre_softmax=True,
        moe_router_dtype="fp64",
        moe_expert_capacity_factor=case.capacity,
        moe_pad_expert_input_to_capacity=case.capacity is not None and case.capacity < 1,
        moe_shared_expert_intermediate_size=12 if case.shared else None,
        moe_shared_expert_overlap=case.overlaps,
        params_dtype=torch.float64,
        **(recompute if case.recompute else {}),
    )
    spec = get_moe_module_spec(use_te=False, num_experts=SLOTS, moe_grouped_gemm=False)
    layer = spec(config=config, pg_collection=get_default_pg_collection())
    layer.set_layer_number(1)
    layer.train()
    half = SLOTS // 2
    for number, expert in zip(layer.local_expert_indices, layer.experts.local_experts, strict=True):
        part = parallel_state.get_expert_tensor_parallel_rank()
        generator = torch.Generator().manual_seed(100 * part + (number % half if case.copies else number))
        for parameter in expert.parameters():
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    for name, parameter in layer.named_parameters():
        if "local_experts" not in name:
            seed = 0 if "router" in name else parallel_state.get_tensor_model_parallel_rank()
            generator = torch.Generator().manual_seed(seed)
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return layer


def use_parm(layer: Any, case: Case, find_costs: Any = None) -> Any:
    """Give a layer Parm's dispatcher, and return it."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from megatron_fssdp.dispatchers.parm import DividedGate, ParmDispatcher, ParmGroups, ScheduleSelector

    class Swapped(ParmDispatcher):
        """The way in which a layer with replicas replaces the routing map."""

        def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
            is_odd = torch.arange(len(routing_map))[:, None] % 2 == 1
            swapped = (x.roll(SLOTS // 2, dims=1) for x in (routing_map, probs))
            swapped_map, swapped_probs = swapped
            return super().dispatch_preprocess(
                hidden_states,
                torch.where(is_odd, swapped_map, routing_map),
                torch.where(is_odd, swapped_probs, probs),
            )

    pg = get_default_pg_collection()
    groups = ParmGroups.of(layer.config, pg)
    selector = ScheduleSelector(
        case.schedule, layer.config, groups, pg.tp_dp_cp, case.simultaneous, find_costs
    )
    dispatcher = (Swapped if case.copies else ParmDispatcher)(
        layer.num_local_experts, layer.local_expert_indices, layer.config, pg, selector=selector
    )
    layer.token_dispatcher = dispatcher
    if case.overlaps:
        dispatcher.set_shared_experts(layer.shared_experts)
    if groups.are_equal:
        gate, own = DividedGate(layer.router, pg), []
        preprocess = type(layer).preprocess.__get__(layer)

        def route(hidden: Tensor, padding_mask: Tensor | None = None) -> Any:
            tokens, *routed = gate.route(dispatcher, hidden, padding_mask)
            own.append(tokens)
            return routed

        layer.route = route
        layer.preprocess = lambda hidden, probs, routing_map: preprocess(own.pop(), probs, routing_map)
        layer.attn_tp_group = type("OneRank", (), {"size": lambda self: 1})()
    return dispatcher


def run(case: Case, layer: Any, hidden: Tensor, upstream: Tensor) -> list[Tensor]:
    """Output, and gradients of the input and of all parameters, summed over ranks as Megatron does."""
    from megatron.core import parallel_state

    mine = hidden.clone().requires_grad_()
    layer.zero_grad()
    output, _ = layer(mine)
    output.backward(upstream)
    found, experts = [output.detach(), mine.grad], {}
    for name, parameter in layer.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if "local_experts" in name:
            local, kind = name.split("local_experts.")[1].split(".", 1)
            of_slots = experts.setdefault(kind, gradient.new_zeros(SLOTS, *gradient.shape))
            of_slots[layer.local_expert_indices[int(local)]] = gradient
            continue
        if "router" in name and layer.config.sequence_parallel:
            dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        found.append(gradient)
    for of_slots in experts.values():
        dist.all_reduce(of_slots, group=parallel_state.get_expert_data_parallel_group())
        dist.all_reduce(of_slots, group=parallel_state.get_expert_model_parallel_group())
        found.append(of_slots.unflatten(0, (2, -1)).sum(dim=0) if case.copies else of_slots)
    return found


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts of the sequence, from all ranks."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def relative(got: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest value."""
    assert got.shape == wanted.shape
    return float((got - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-9)
