"""Hooks on experts, and wrappers around their linear layers, which users add to the built model."""

from collections.abc import Callable
from itertools import product
from types import MethodType
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.activation_logging import ActivationLogger
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.experts.slot_experts import SlotExperts, _blanks_like
from tests.support.training_preload import run_megatron_ranks

from ..grouped_linear import grouped_experts
from ..layer.small_config import build_layer, moe_config, session_of

TOKENS, HIDDEN, EXPERTS = 24, 8, 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_slots_sum_in_the_data_type_of_their_neighbours(dtype: torch.dtype) -> None:
    weights = [torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)) for _ in range(2)]
    for one in weights:
        one.main_grad = torch.zeros_like(one, dtype=dtype)
    assert [one.main_grad.dtype for one in next(_blanks_like(tuple(weights)))] == [dtype, dtype]


class Additions(TorchDispatchMode):
    """Counts additions of tensors with two axes, in autograd too."""

    num = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_addition = operator.name().startswith(("aten::add.Tensor", "aten::add_.Tensor"))
        self.num += is_addition and args[0].dim() == 2
        return operator(*args, **(kwargs or {}))


def test_empty_slots_have_no_gradients_to_add_and_share_their_memory() -> None:
    assert run_megatron_ranks(_with_empty_slots, 1) == [2 * 6]


def _with_empty_slots(rank: int, world_size: int) -> int:
    """Additions with two experts and four empty slots: the grouped layers add to each ``main_grad`` once."""
    config = moe_config(world_size, HIDDEN, 2, moe_grouped_gemm=True)
    config.gradient_accumulation_fusion = True
    module = grouped_experts(fuses=True)(
        2, config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups()
    )
    experts = SlotExperts(module, 2)
    for one in module.parameters():
        one.main_grad, one.grad_added_to_main_grad = torch.zeros_like(one), False
    experts.bind([None, experts.parameters[0], None, None, experts.parameters[1], None], for_iteration=True)
    body = experts._body
    blanks = [body.linear_fc1._parameters[f"weight{index}"] for index in (0, 2, 3, 5)]
    assert len({id(one) for one in blanks}) == 4
    assert len({one.data_ptr() for one in blanks}) == len({one.main_grad.data_ptr() for one in blanks}) == 1
    assert {one.requires_grad for one in body.parameters()} == {True}
    rows = torch.randn(6, HIDDEN, requires_grad=True)
    output, _ = experts.compute(rows, torch.tensor([0, 4, 0, 0, 2, 0]), torch.ones(6))
    with Additions() as additions:
        output.sum().backward()
    assert all(one.grad is None for one in blanks)
    assert all(one.main_grad.count_nonzero() for one in module.parameters())
    return additions.num


def test_quantized_copies_end_with_the_weights_of_an_iteration() -> None:
    assert run_megatron_ranks(_kept_copies, 1) == [[[2, 0], [0, 3], [0, 0], [2, 0]]]


def _kept_copies(rank: int, world_size: int) -> list[list[int]]:
    """Copies that stay for two and for three slots: two iterations, a pass of its own, an iteration."""
    config = moe_config(world_size, HIDDEN, 2, moe_grouped_gemm=True)
    module = grouped_experts()(
        2, config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups()
    )
    experts, found = SlotExperts(module, 2), []
    for slots, for_iteration in ((2, True), (3, True), (2, False), (2, True)):
        experts.bind([*experts.parameters, None][:slots], for_iteration=for_iteration)
        experts.compute(torch.ones(4, HIDDEN), torch.tensor([2, 2, 0][:slots]), torch.ones(4))
        bodies = [experts._bodies.get(number) for number in (2, 3)]
        found.append([len(one.linear_fc2._fp8_workspaces) if one else 0 for one in bodies])
    return found


def build(world_size: int, *, grouped: bool) -> Any:
    config = moe_config(world_size, HIDDEN, EXPERTS, moe_grouped_gemm=grouped)
    return build_layer(config, "fssdp", {"slots": 1, "overlap_degree": 2})


def draw(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=generator)
    return (hidden + 1).requires_grad_()  # A common direction: some experts are hot.


def test_hooks_on_the_expert_module_run_once_and_hooks_inside_are_refused() -> None:
    """Inside, a hook would see the rows of whatever expert is in a slot."""
    for found in run_megatron_ranks(_hooked, 2, ep=2):
        for name, (num_seen, difference, message) in found.items():
            assert num_seen == 2, name
            assert difference <= 1e-6, name
            assert "hook" in message
            assert "--moe-strategy none" in message


def _hooked(rank: int, world_size: int) -> dict[str, tuple[int, float, str]]:
    """Passes that a hook has seen, the difference of a doubled output, and the refusal of a hook inside."""
    found = {}
    for name, grouped in (("one by one", False), ("grouped", True)):
        layer, seen = build(world_size, grouped=grouped), []
        hidden = draw(rank)
        layer(hidden)[0].sum().backward()  # The next pass has replicas.
        plain = layer(hidden)[0].detach()
        layer.experts.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        layer.experts.register_forward_hook(lambda module, rows, result: (result[0] * 2, result[1]))
        doubled = [layer(hidden)[0].detach() for _ in range(2)]
        difference = max(float((one - 2 * plain).abs().max()) for one in doubled)
        linears = layer.experts if grouped else layer.experts.local_experts[0]
        hook = ActivationLogger("")._make_activation_hook("", "") if grouped else print
        linears.linear_fc1.register_forward_hook(hook, with_kwargs=True)
        with pytest.raises(ConfigurationError) as refused:
            layer(hidden)
        found[name] = len(seen), difference, str(refused.value)
    return found


def test_changed_experts_are_refused() -> None:
    """Hosts add adapters before DDP wraps the model, or later."""
    for messages in run_megatron_ranks(_wrapped, 2, ep=2):
        assert len(messages) == 11 + 2
        for message in messages:
            assert any(one in message for one in ("LoRA", "meta device", "Megatron-FSDP"))
            assert "--moe-strategy none" in message


class _Adapter(torch.nn.Module):
    """A linear layer beside a frozen one, as in LoRA."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base, self.down = base, torch.nn.Linear(HIDDEN, 2)

    def forward(self, *arguments: Any) -> Any:
        return self.base(*arguments)


class _Quantized(torch.nn.Module):
    """A class that replaces that of a module in its place, as ModelOpt's do."""


def _wrapped(rank: int, world_size: int) -> list[str]:
    from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer

    messages = []
    for grouped, how in product(
        (False, True), ("wrapped", "adapter inside", "class", "whole expert", "weight", "FSDP")
    ):
        layer = build(world_size, grouped=grouped)
        layer(draw(rank))
        linears = layer.experts if grouped else layer.experts.local_experts[-1]
        if how == "wrapped":
            linears.linear_fc1 = _Adapter(linears.linear_fc1)
        elif how == "adapter inside":
            linears.linear_fc2.adapter = torch.nn.Linear(HIDDEN, 2)
        elif how == "weight":
            name = "weight0" if grouped else "weight"
            setattr(linears.linear_fc1, name, torch.nn.Parameter(getattr(linears.linear_fc1, name).detach()))
        elif how == "FSDP":
            next(layer.experts.parameters()).__fsdp_param__ = True
        elif how == "class":
            kind = type(linears.linear_fc2)
            linears.linear_fc2.__class__ = type("Quantized", (_Quantized, kind), {})
        elif not grouped:
            layer.experts.local_experts[0] = _Adapter(layer.experts.local_experts[0])
        else:
            continue
        with pytest.raises(ConfigurationError) as refused:
            layer(draw(rank))
        messages.append(str(refused.value))
    for grouped in (False, True):
        config = moe_config(world_size, HIDDEN, EXPERTS, moe_grouped_gemm=grouped)
        layer = build_layer(config, "fssdp", {}, stock=True)
        linears = layer.experts if grouped else layer.experts.local_experts[-1]
        linears.linear_fc1.adapter = torch.nn.Linear(HIDDEN, 2)
        with pytest.raises(ConfigurationError) as refused:
            StrategyMoELayer.of(layer, session_of("fssdp", {}))
        messages.append(str(refused.value))
    return messages


def test_what_replicas_would_lack_is_refused() -> None:
    """Hosts replace methods of single objects, quantize linear layers, and change gradients in hooks."""
    for found in run_megatron_ranks(_changed, 2, ep=2):
        for (what, *_), message in found.items():
            assert what in message
            assert "--moe-strategy none" in message


def _changed(rank: int, world_size: int) -> dict[tuple[str, bool, bool], str]:
    """What is said of each change before and after layers with experts one by one and grouped have joined."""
    from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer

    def own(owner: Any, name: str) -> None:
        setattr(owner, name, MethodType(getattr(type(owner), name), owner))

    def linear(layer: Any) -> Any:
        return getattr(layer.experts, "local_experts", [layer.experts])[-1].linear_fc1

    changes: dict[str, Callable[[Any], object]] = {
        "another forward pass": lambda layer: own(layer.experts, "forward"),
        "Linear with another forward pass": lambda layer: own(linear(layer), "forward"),
        "quantizers": lambda layer: linear(layer).add_module("quantizer", torch.nn.Identity()),
        "hooks on their Parameters": lambda layer: [*layer.experts.parameters()][-1].register_hook(torch.abs),
        "combine_postprocess": lambda layer: own(layer.token_dispatcher, "combine_postprocess"),
        "postprocess": lambda layer: own(layer, "postprocess"),
    }
    found = {}
    for what, grouped, joined in product(changes, (False, True), (False, True)):
        if what == "postprocess" and joined:
            continue  # It may call the method that was there.
        config = moe_config(world_size, HIDDEN, EXPERTS, moe_grouped_gemm=grouped)
        layer, session = build_layer(config, "fssdp", {}, stock=True), session_of("fssdp", {"slots": 1})
        if joined:
            StrategyMoELayer.of(layer, session)(draw(rank))
        changes[what](layer)
        with pytest.raises(ConfigurationError) as refused:
            (layer if joined else StrategyMoELayer.of(layer, session))(draw(rank))
        found[what, grouped, joined] = str(refused.value)
    return found
