"""Hooks on experts, and wrappers around their linear layers, which users add to the built model."""

from contextlib import nullcontext
from itertools import product
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from megatron.training.activation_logging import ActivationLogger
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.experts.slot_experts import SlotExperts, _blanks_like
from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer
from tests.support.training_preload import on_ranks

from ..layer.small_config import build_layer, moe_config, session_of

TOKENS, HIDDEN, EXPERTS = 24, 8, 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_slots_sum_in_the_data_type_of_their_neighbours(dtype):
    weights = [torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)) for _ in range(2)]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=dtype)
    assert [weight.main_grad.dtype for weight in next(_blanks_like(tuple(weights)))] == [dtype, dtype]


class Additions(TorchDispatchMode):
    """Counts additions of tensors with two axes, in autograd too."""

    num = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        is_addition = operator.name().startswith(("aten::add.Tensor", "aten::add_.Tensor"))
        self.num += is_addition and args[0].dim() == 2
        return operator(*args, **(kwargs or {}))


@on_ranks(1)
def test_empty_slots_have_no_gradients_to_add_and_share_their_memory():
    """With two experts and four empty slots, the grouped layers add to each ``main_grad`` once."""
    config = moe_config(1, HIDDEN, 2, moe_grouped_gemm=True)
    module = build_layer(config, "", {}, stock=True, fuses=True).experts
    config.gradient_accumulation_fusion = True
    experts = SlotExperts(module, 2)
    for parameter in module.parameters():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    module.requires_grad_(False)  # As adapters are while a reference computes, which may bind slots.
    experts.bind([None, experts.parameters[0], None, None, experts.parameters[1], None], for_iteration=True)
    module.requires_grad_(True)
    body = experts._body
    blanks = [body.linear_fc1._parameters[f"weight{index}"] for index in (0, 2, 3, 5)]
    assert len({id(p) for p in blanks}) == 4
    assert len({p.data_ptr() for p in blanks}) == len({p.main_grad.data_ptr() for p in blanks}) == 1
    assert {parameter.requires_grad for parameter in body.parameters()} == {True}
    rows = torch.randn(6, HIDDEN, requires_grad=True)
    output, _ = experts.compute(rows, torch.tensor([0, 4, 0, 0, 2, 0]), torch.ones(6))
    with Additions() as additions:
        output.sum().backward()
    assert all(p.grad is None for p in blanks)
    assert all(parameter.main_grad.count_nonzero() for parameter in module.parameters())
    assert additions.num == 2 * 6


@on_ranks(1)
def test_quantized_copies_end_with_the_weights_of_an_iteration():
    """Copies that stay for two and for three slots: two iterations, a pass of its own, an iteration."""
    module = build_layer(moe_config(1, HIDDEN, 2, moe_grouped_gemm=True), "", {}, stock=True).experts
    experts, copies = SlotExperts(module, 2), []
    for slots, for_iteration in ((2, True), (3, True), (2, False), (2, True)):
        experts.bind([*experts.parameters, None][:slots], for_iteration=for_iteration)
        experts.compute(torch.ones(4, HIDDEN), torch.tensor([2, 2, 0][:slots]), torch.ones(4))
        bodies = [experts._bodies.get(number) for number in (2, 3)]
        copies.append([len(body.linear_fc2._fp8_workspaces) if body else 0 for body in bodies])
    assert copies == [[2, 0], [0, 3], [0, 0], [2, 0]]


@on_ranks(1)
def test_an_expert_of_another_layer_computes_with_the_activation_of_this_one():
    """Step-3.5 limits the activations of single layers."""
    layers = []
    for limit in (None, 0.01):
        config = moe_config(1, HIDDEN, 2, gated_linear_unit=True, activation_func=torch.nn.functional.silu)
        config.activation_func_clamp_value = limit
        layers.append(build_layer(config, "ep", {}, stock=True).experts)
    unlimited, limited = map(SlotExperts, layers, (2, 2))
    limited.share_modules([unlimited, limited])
    limited.bind(unlimited.parameters, for_iteration=True)
    given = torch.randn(4, HIDDEN), torch.tensor([2, 2]), torch.ones(4)
    got, _ = limited.compute(*given)
    for mine, theirs in zip(layers[1].parameters(), layers[0].parameters(), strict=True):
        mine.data.copy_(theirs)
    wanted, _ = layers[1](*given)
    torch.testing.assert_close(got, wanted)
    assert not torch.allclose(layers[0](*given)[0], wanted)


@on_ranks(1)
def test_adapters_that_a_host_switches_off_are_off_in_all_slots():
    """As in the passes of a reference, with an expert in a copy of the module, and back again."""
    for grouped, host in product((False, True), ("bridge", "mcore_bridge")):
        config = moe_config(1, HIDDEN, 2, moe_grouped_gemm=grouped)
        module = build_layer(config, "ep", {}, stock=True, adapters=host).experts
        experts, outputs = SlotExperts(module, 2), []
        held = [torch.nn.Parameter(tensor.clone()) for tensor in experts.parameters[1]]
        experts.bind([experts.parameters[0], held], for_iteration=True)
        given = torch.randn(4, HIDDEN), torch.tensor([2, 2]), torch.ones(4)
        for is_off in (False, True, False):
            for layer in module.modules():
                if hasattr(layer, "is_off"):
                    layer.is_off = is_off
            outputs.append(module(*given)[0].detach())
            torch.testing.assert_close(experts.compute(*given)[0], outputs[-1])
        assert not torch.allclose(outputs[0], outputs[1])
        experts._adapted[0][1].merged = experts._adapted[0][1].disable_adapters = True
        with pytest.raises(ConfigurationError, match="unmerge"):
            experts.compute(*given)
        experts.places.check_unchanged(module)
        experts.parameters[0][-1].requires_grad_(True)
        with torch.no_grad():
            experts.places.check_unchanged(module)
        with pytest.raises(ConfigurationError, match="were frozen when DDP"):
            experts.places.check_unchanged(module)


@on_ranks(2, ep=2)
def test_adapters_of_another_data_type_or_scale_than_others_are_refused():
    """An expert travels as one tensor, and a re-shard lets it compute in the place of another layer's."""

    def scale(down):
        down.scaling = {"default": 4}

    for words, change, experts in (
        ("data types torch.bfloat16 and torch.float32", torch.nn.Module.bfloat16, slice(1)),
        ("several scales", scale, slice(1)),
        ("different LoRA adapters", scale, slice(None)),
    ):
        session, config = session_of("fssdp", {"reshard_interval": 2}), moe_config(2, HIDDEN, EXPERTS)
        first, second = (build_layer(config, "", {}, stock=True, adapters="mcore_bridge") for _ in range(2))
        StrategyMoELayer.of(first, session)
        for expert in second.experts.local_experts[experts]:
            change(expert.linear_fc2.lora_A)
        with pytest.raises(ConfigurationError, match=words):
            StrategyMoELayer.of(second, session)
    # In older versions of Megatron-Bridge, adapters of grouped experts begin with other values on each rank,
    # or their gradients are not summed.
    config = moe_config(2, HIDDEN, EXPERTS, moe_grouped_gemm=True)
    layers = [build_layer(config, "", {}, stock=True, adapters="bridge") for _ in range(3)]
    layers[0].experts.linear_fc2.adapter._allreduce_shared_expert_grad = None
    with pytest.raises(ConfigurationError, match="of one for those of all ranks"):
        StrategyMoELayer.of(layers[0], session_of("fssdp", {}))
    refusal = pytest.raises(ConfigurationError, match="values differ between ranks")
    for layer, strategy, outcome in zip(layers[1:], ("ep", "fssdp"), (nullcontext(), refusal), strict=True):
        layer.experts.linear_fc1.adapter.linear_in.weight.data.fill_(1 + dist.get_rank())
        StrategyMoELayer.of(layer, session := session_of(strategy, {}))
        with outcome:
            session.runtime.begin_iteration(1, 1)


def draw():
    generator = torch.Generator().manual_seed(dist.get_rank())
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=generator)
    return (hidden + 1).requires_grad_()  # A common direction: some experts are hot.


@on_ranks(2, ep=2)
def test_hooks_on_the_expert_module_run_once_and_hooks_inside_are_refused():
    """Inside, a hook would see the rows of whatever expert is in a slot."""
    for grouped in (False, True):
        config = moe_config(2, HIDDEN, EXPERTS, moe_grouped_gemm=grouped)
        layer, seen = build_layer(config, "fssdp", {"slots": 1, "overlap_degree": 2}), []
        hidden = draw()
        layer(hidden)[0].sum().backward()  # The next pass has replicas.
        plain = layer(hidden)[0].detach()
        layer.experts.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        layer.experts.register_forward_hook(lambda module, rows, result: (result[0] * 2, result[1]))
        for _ in range(2):
            torch.testing.assert_close(layer(hidden)[0].detach(), 2 * plain, rtol=0, atol=1e-6)
        assert len(seen) == 2
        linears = layer.experts if grouped else layer.experts.local_experts[0]
        hook = ActivationLogger("")._make_activation_hook("", "") if grouped else print
        linears.linear_fc1.register_forward_hook(hook, with_kwargs=True)
        with pytest.raises(ConfigurationError, match=r"hook[\s\S]*--moe-strategy none"):
            layer(hidden)


class _Adapter(torch.nn.Module):
    """A linear layer beside a frozen one, as in LoRA."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, torch.nn.Linear(HIDDEN, 2)

    def forward(self, *arguments):
        return self.base(*arguments)


class _Quantized(torch.nn.Module):
    """A class that replaces that of a module in its place, as ModelOpt's do."""


def _own(owner, name):
    setattr(owner, name, MethodType(getattr(type(owner), name), owner))


def _last(layer):
    return getattr(layer.experts, "local_experts", [layer.experts])[-1]


def _replace_weight(linear):
    name = "weight" if hasattr(linear, "weight") else "weight0"
    setattr(linear, name, torch.nn.Parameter(getattr(linear, name).detach()))


def _wrap_whole(experts):
    """The last expert, or grouped experts' second layer."""
    if hasattr(experts, "local_experts"):
        experts.local_experts[-1] = _Adapter(experts.local_experts[-1])
    else:
        experts.linear_fc2 = _Adapter(experts.linear_fc2)


def _quantize(linear):
    linear.__class__ = type("Quantized", (_Quantized, type(linear)), {})


BEFORE, AFTER, BOTH = (False,), (True,), (False, True)
# What is said of a change, how it is made, and whether layers have joined the strategy when it comes.
CHANGES = [
    ("another forward pass", lambda layer: _own(layer.experts, "forward"), BOTH),
    ("Linear with another forward pass", lambda layer: _own(_last(layer).linear_fc1, "forward"), BOTH),
    ("quantizers", lambda layer: _last(layer).linear_fc1.add_module("quantizer", torch.nn.Identity()), BOTH),
    ("hooks on their", lambda layer: [*layer.experts.parameters()][-1].register_hook(torch.abs), BOTH),
    ("combine_postprocess", lambda layer: _own(layer.token_dispatcher, "combine_postprocess"), BOTH),
    # Afterwards it may call the method that was there.
    ("postprocess", lambda layer: _own(layer, "postprocess"), BEFORE),
    ("LoRA", lambda layer: setattr(_last(layer).linear_fc1, "adapter", torch.nn.Linear(HIDDEN, 2)), BOTH),
    ("LoRA", lambda layer: setattr(_last(layer), "linear_fc1", _Adapter(_last(layer).linear_fc1)), BOTH),
    ("LoRA", lambda layer: _wrap_whole(layer.experts), BOTH),
    ("LoRA", lambda layer: _quantize(_last(layer).linear_fc2), AFTER),
    ("meta device", lambda layer: _replace_weight(_last(layer).linear_fc1), AFTER),
    ("Megatron-FSDP", lambda layer: setattr(next(layer.experts.parameters()), "__fsdp_param__", True), AFTER),
]


@on_ranks(2, ep=2)
def test_changed_experts_are_refused():
    """Hosts wrap, quantize and replace parts, add hooks, and replace methods of single objects."""
    for (words, change, when), grouped in product(CHANGES, (False, True)):
        for joined in when:
            config = moe_config(2, HIDDEN, EXPERTS, moe_grouped_gemm=grouped)
            layer, session = build_layer(config, "fssdp", {}, stock=True), session_of("fssdp", {"slots": 1})
            if joined:
                StrategyMoELayer.of(layer, session)(draw())
            change(layer)
            with pytest.raises(ConfigurationError) as refused:
                (layer if joined else StrategyMoELayer.of(layer, session))(draw())
            assert words in str(refused.value)
            assert "--moe-strategy none" in str(refused.value)
