"""Lets Megatron's own expert module compute the experts that are in the slots of this device.

Megatron builds a module for the E/D experts that a rank owns at the start. Slots hold these Parameters, those
of other layers after a re-shard, and replicas. :class:`SlotExperts` therefore computes with a *body*: a
shallow copy of Megatron's module with its config, groups, hooks and kernels, but bound to the Parameters of
slots. Sequential experts are modules of their own, so the body consists of Megatron's modules for owned slots
and of copies for replicas, and empty slots cost nothing. A grouped linear layer has the weights of all U
slots, so empty ones are bound to experts of zeros that all layers share; they get no tokens.

Shape letters: R rows that a rank receives, M model dimension, U slots of a device, E experts, D devices.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count
from typing import Any

import torch
import torch.distributed as dist

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.experts.expert_places import LINEARS, ExpertPlaces, is_adapted, is_shared
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ExpertParameters

_QUANTIZED = ("fp8", "fp4", "use_kitchen", "quant_recipe")
_blanks: dict[tuple[object, ...], list[ExpertParameters]] = {}


class SlotExperts:
    """The forward pass of Megatron's expert module for the experts in the slots of this device.

    :class:`ExpertPlaces` says which modules these may be.
    """

    def __init__(self, module: Any, num_experts: int, group: dist.ProcessGroup | None = None) -> None:
        self.module, self.places = module, ExpertPlaces(module, num_experts, group)
        self.parameters = self.places.parameters
        self._adapted: list[tuple[Any, Any]] = []  # Copies of linear layers with adapters, and of which.
        self._bodies: dict[int, Any] = {}  # Of grouped experts, by number of slots.
        self._mlps: dict[int, Any] = {}  # Modules of sequential experts by their first Parameter.
        if hasattr(module, "local_experts"):
            pairs = zip(self.parameters, module.local_experts, strict=True)
            self._mlps = {id(parameters[0]): mlp for parameters, mlp in pairs}
        self._body: Any = None
        self._used: torch.Tensor | None = None

    def share_modules(self, others: Sequence["SlotExperts"]) -> None:
        """Let this layer's activation compute with linear layers of others, whose Parameters it may hold."""
        for key, mlp in chain.from_iterable(other._mlps.items() for other in others):
            if key not in self._mlps:
                self._mlps[key] = self._mlp_of(_linears(mlp))

    def bind(self, parameters_U: Sequence[ExpertParameters | None], *, for_iteration: bool) -> None:
        """Compute with the Parameters of each slot of this device from now on; ``None`` for an empty slot.

        If they are ``for_iteration``, slots keep their contents, and weights may be quantized once in it.
        """
        if hasattr(self.module, "local_experts"):
            self._bind_sequential(parameters_U)
        else:
            self._bind_grouped(parameters_U, for_iteration)

    def _bind_sequential(self, parameters_U: Sequence[ExpertParameters | None]) -> None:
        used = [slot for slot, parameters in enumerate(parameters_U) if parameters is not None]
        self._used = None if len(used) == len(parameters_U) else torch.tensor(used, dtype=torch.long)
        mlps = _like(self.module.local_experts)
        mlps._modules = {str(place): self._mlp(parameters_U[slot]) for place, slot in enumerate(used)}
        self._body = _like(self.module)
        self._body.num_local_experts = len(used)
        self._body._modules["local_experts"] = mlps

    def _bind_grouped(self, parameters_U: Sequence[ExpertParameters | None], for_iteration: bool) -> None:
        num_slots = len(parameters_U)
        if num_slots not in self._bodies:
            self._bodies[num_slots] = self._grouped_body(num_slots)
        self._body = self._bodies[num_slots]
        layers = self.places.layers(self._body)
        # Only slots of an iteration have quantized copies that outlive a pass, and they end with their body.
        for layer in chain.from_iterable(map(self.places.layers, self._bodies.values())):
            if not for_iteration or layer not in layers:
                getattr(layer, "_fp8_workspaces", {}).clear()
        like = next((parameters for parameters in parameters_U if parameters is not None), self.parameters[0])
        blanks = _blanks_like(like, self.places.num_trained)
        for index, parameters in enumerate(parameters_U):
            self.places.bind(layers, parameters or next(blanks), str(index))
        for layer, stock in zip(layers, self.places.layers(self.module), strict=True):
            # In its first pass of an iteration, a layer quantizes its weights and keeps the result. It then
            # also replaces gradients instead of adding to them, so Megatron says so under these recipes only.
            layer.is_first_microbatch = any(getattr(self.module.config, name, None) for name in _QUANTIZED)
            layer.disable_parameter_transpose_cache = not for_iteration or getattr(
                stock, "disable_parameter_transpose_cache", True
            )
        if getattr(self._body, "_fused_ops", None) is not None:
            self._body._fused_ops = None  # They have the weights of before; the module builds them anew.

    def compute(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor, **buffers: Any
    ) -> tuple[torch.Tensor, None]:
        """Compute the slots' experts on their rows, as the forward pass of Megatron's module does.

        Rows ``[R, M]`` are sorted by slot. There are ``tokens_per_expert`` ``[U]`` of each slot, and each has
        a routing probability ``[R]``. The result is ``[R, M]``, and no bias. It depends on ``rows`` and
        ``probs`` also if all slots are empty, so that the graphs of all ranks have the same collectives.
        """
        body = self._body
        # Hosts switch adapters off for some passes, as in those of a reference.
        for copy, adapted in self._adapted:
            if getattr(adapted, "merged", False) and getattr(adapted, "disable_adapters", False):
                raise ConfigurationError(
                    "experts: got adapters that are merged and switched off, wanted one of both, because "
                    "each copy of a layer would take them out of the weights; call unmerge_adapter() before"
                )
            vars(copy).update({name: value for name, value in vars(adapted).items() if name != "_modules"})
        if body.training != self.module.training:
            body.train(self.module.training)
        if self._used is not None:
            if not len(self._used):
                return (rows * probs.unsqueeze(-1)).to(rows.dtype), None
            tokens_per_expert = tokens_per_expert[self._used.to(tokens_per_expert.device)]
        # Megatron has called its own module, whose hooks the body shares; they must run once.
        output, bias = body.forward(rows, tokens_per_expert, probs, **buffers)
        assert bias is None  # Both modules add the output's bias to the rows.
        return output, None

    def backward_dw(self) -> None:
        """Compute the weight gradients that the last backward pass has left."""
        self._body.backward_dw()
        for parameter in self._body.parameters():
            if parameter.grad is not None:  # It was assigned, so the hooks of replicas have not been called.
                for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                    hook(parameter)

    def _mlp(self, parameters: Any) -> Any:
        key = id(parameters[0])
        if key not in self._mlps:
            self._mlps[key] = self._mlp_of(map(self._unbound, _linears(self.module.local_experts[0])))
            self.places.bind(self.places.layers(self._mlps[key]), parameters, "")
        return self._mlps[key]

    def _mlp_of(self, linears: Iterable[Any]) -> Any:
        mlp = _like(self.module.local_experts[0])
        mlp._modules.update(zip(LINEARS, linears, strict=True))
        return mlp

    def _grouped_body(self, num_slots: int) -> Any:
        experts = self.module
        body = _like(experts)
        body.num_local_experts = num_slots
        body._modules.update(zip(LINEARS, map(self._unbound, _linears(experts)), strict=True))
        for layer in self.places.layers(body):
            layer.num_gemms = num_slots
            # Scales and caches of quantized weights belong to one number of experts.
            layer.__dict__.update({name: dict(x) for name, x in vars(layer).items() if type(x) is dict})
            if "bias0" in vars(layer):  # Transformer Engine has an empty tensor for a missing bias.
                layer.__dict__.update({f"bias{i}": layer.bias0 for i in range(num_slots)})
        for name in ("quantization_padding", "quantization_unpadding"):
            if (padding := getattr(experts, name, None)) is not None:
                body._modules[name] = type(padding)(num_slots, align_size=padding.align_size)
        return body

    def _unbound(self, layer: Any) -> Any:
        """A copy of a layer, and of those inside of it, without the Parameters of experts."""
        copy = _like(layer)
        copy._parameters = {name: tensor for name, tensor in layer._parameters.items() if tensor is None}
        # Megatron's own linear layers take main_grad in the forward pass, when replicas have none.
        copy.gradient_accumulation_fusion = False
        store = getattr(layer, "wgrad_store", None)
        if store is not None:  # Delayed weight gradients wait in it; each layer needs its own.
            copy.wgrad_store = type(store)(store.delay_wgrad_compute())
        for name, part in layer.named_children():
            if next(part.parameters(), None) is not None and not is_shared(part):
                copy._modules[name] = self._unbound(part)
        if is_adapted(layer):
            self._adapted.append((copy, layer))
        return copy


def _blanks_like(like: ExpertParameters, num_trained: int | None = None) -> Iterator[ExpertParameters]:
    """Experts of zeros for empty slots, which share their memory and places for gradients that nobody reads.

    Each slot has other Parameters, because autograd adds the gradients of one that is bound several times.
    They require gradients as the others do in training: Transformer Engine asks the first slot's, or refuses
    a mixture. Slots may be bound while a host has switched adapters off, which then require none.
    """
    sums = tuple(getattr(parameter, "main_grad", parameter).dtype for parameter in like)
    layout = ExpertLayout.of(like, num_trained)
    key = (layout, like[0].device, sums)
    known = _blanks.setdefault(key, [])
    for number in count():
        if number == len(known):
            shared = known[0] if known else like
            known.append(
                tuple(_blank(p, at < layout.num_trained, bool(known)) for at, p in enumerate(shared))
            )
        yield known[number]


def _blank(like: Any, is_trained: bool, shares: bool) -> torch.nn.Parameter:
    zeros, gradient = like.detach(), getattr(like, "main_grad", like.detach())
    if not shares:
        zeros, gradient = torch.zeros_like(zeros), torch.zeros_like(gradient)
    parameter: Any = torch.nn.Parameter(zeros, requires_grad=is_trained)
    parameter.main_grad, parameter.allreduce, parameter.grad_added_to_main_grad = gradient, False, False
    if is_trained:
        parameter.register_post_accumulate_grad_hook(_forget_gradient)
    return parameter


def _forget_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _linears(module: Any) -> list[Any]:
    return [getattr(module, name) for name in LINEARS]


def _like(module: Any) -> Any:
    """A module that shares everything with another one but its tables of Parameters and submodules."""
    like = object.__new__(type(module))
    like.__dict__.update(module.__dict__)
    like.__dict__["_parameters"] = dict(module._parameters)
    like.__dict__["_modules"] = dict(module._modules)
    for name in ("forward", "backward_dw"):  # The layer has put its own in the place of the module's.
        like.__dict__.pop(name, None)
    return like
