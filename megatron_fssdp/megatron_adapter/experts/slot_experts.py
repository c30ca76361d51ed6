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
from itertools import chain, count, product, repeat
from typing import Any

import torch

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ExpertParameters

_LINEARS = ("linear_fc1", "linear_fc2")
_QUANTIZED = ("fp8", "fp4", "use_kitchen", "quant_recipe")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_blanks: dict[tuple[object, ...], list[ExpertParameters]] = {}


def expert_parameters(experts: Any, num_experts: int) -> list[ExpertParameters]:
    """Return the Parameters of each local expert of a module, in the order of ``ExpertParameters``."""
    if hasattr(experts, "local_experts"):
        places = [(mlp, "") for mlp in experts.local_experts]
    else:
        places = [(experts, str(index)) for index in range(num_experts)]
    for (mlp, index), name in product(places, _LINEARS):
        if not hasattr(getattr(mlp, name, None), f"weight{index}"):
            raise ConfigurationError(
                f"expert module: got {type(experts).__name__} without {name}.weight{index}, wanted "
                "SequentialMLP or TEGroupedMLP as Megatron's MoE specs build them; leave experts out of the "
                "target modules of LoRA adapters, or use --moe-strategy none"
            )
    # Transformer Engine stores an empty tensor instead of a missing bias.
    return [
        tuple(
            tensor
            for name in (f"weight{index}", f"bias{index}")
            for linear in _linears(mlp)
            if (tensor := getattr(linear, name, None)) is not None and tensor.numel() > 0
        )
        for mlp, index in places
    ]


class SlotExperts:
    """The forward pass of Megatron's expert module for the experts in the slots of this device.

    The module is ``SequentialMLP``, or ``TEGroupedMLP`` with one weight tensor for each expert;
    another one is a ConfigurationError.
    """

    def __init__(self, module: Any, num_experts: int) -> None:
        self.module = module  # It stays as it is.
        self.parameters = expert_parameters(module, num_experts)  # as Megatron registered them
        known = {id(tensor) for tensors in self.parameters for tensor in tensors}
        others = [name for name, p in module.named_parameters() if id(p) not in known and p.numel()]
        if others:
            raise ConfigurationError(
                f"experts: got {others[0]} beside the weights and biases of linear_fc1 and linear_fc2 (LoRA "
                "adapters?), wanted no other Parameters, because only these travel to slots; leave experts "
                "out of the adapters' target modules, or use --moe-strategy none"
            )
        self._refuse(_method_of(module) or next(_foreign_parts(module, self.parameters), None))
        self._structure = _structure_of(module)
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
            self._bodies[num_slots] = _grouped_body(self.module, num_slots)
        self._body = self._bodies[num_slots]
        # Only slots of an iteration have quantized copies that outlive a pass, and they end with their body.
        for linear in chain.from_iterable(map(_linears, self._bodies.values())):
            if not for_iteration or linear not in _linears(self._body):
                getattr(linear, "_fp8_workspaces", {}).clear()
        blanks = _blanks_like(
            next((parameters for parameters in parameters_U if parameters is not None), self.parameters[0])
        )
        for index, parameters in enumerate(parameters_U):
            _bind(_linears(self._body), parameters or next(blanks), str(index))
        for linear, stock in zip(_linears(self._body), _linears(self.module), strict=True):
            # In its first pass of an iteration, a layer quantizes its weights and keeps the result. It then
            # also replaces gradients instead of adding to them, so Megatron says so under these recipes only.
            linear.is_first_microbatch = any(getattr(self.module.config, name, None) for name in _QUANTIZED)
            linear.disable_parameter_transpose_cache = not for_iteration or getattr(
                stock, "disable_parameter_transpose_cache", True
            )
        if getattr(self._body, "_fused_ops", None) is not None:
            self._body._fused_ops = None  # They have the weights of before; the module builds them anew.

    def check_unchanged(self, module: Any) -> None:
        """Refuse, by a ConfigurationError, a layer's module that was changed or replaced since then."""
        change = None
        if module is not self.module:
            change = f"a {type(module).__name__} in the place of the expert module"
        elif hasattr(self.parameters[0][0], "__fsdp_param__"):
            change = "Megatron-FSDP in the place of Megatron's DDP"
        elif _structure_of(self.module) != self._structure:
            change = "linear layers that were wrapped or replaced (LoRA adapters, quantizers)"
        elif [[*map(id, tensors)] for tensors in expert_parameters(self.module, len(self.parameters))] != [
            [*map(id, tensors)] for tensors in self.parameters
        ]:
            change = "Parameters that were replaced (meta device, new weights)"
        self._refuse(change or next(_foreign_parts(self.module, self.parameters), None))

    @staticmethod
    def _refuse(change: str | None) -> None:
        if change is not None:
            raise ConfigurationError(
                f"experts: got {change}, wanted those that Megatron builds, because slots hold other experts "
                "and copies of experts; put hooks, which see rows by slot, on the whole expert module, copy "
                "values into Parameters, or use --moe-strategy none"
            )

    def compute(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor, **buffers: Any
    ) -> tuple[torch.Tensor, None]:
        """Compute the slots' experts on their rows, as the forward pass of Megatron's module does.

        Rows ``[R, M]`` are sorted by slot. There are ``tokens_per_expert`` ``[U]`` of each slot, and each has
        a routing probability ``[R]``. The result is ``[R, M]``, and no bias. It depends on ``rows`` and
        ``probs`` also if all slots are empty, so that the graphs of all ranks have the same collectives.
        """
        body = self._body
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
            self._mlps[key] = self._mlp_of(map(_unbound, _linears(self.module.local_experts[0])))
            _bind(_linears(self._mlps[key]), parameters, "")
        return self._mlps[key]

    def _mlp_of(self, linears: Iterable[Any]) -> Any:
        mlp = _like(self.module.local_experts[0])
        mlp._modules.update(zip(_LINEARS, linears, strict=True))
        return mlp


def _grouped_body(experts: Any, num_slots: int) -> Any:
    body = _like(experts)
    body.num_local_experts = num_slots
    for name in _LINEARS:
        linear = body._modules[name] = _unbound(getattr(experts, name))
        linear.num_gemms = num_slots
        # Scales and caches of quantized weights belong to one number of experts.
        linear.__dict__.update({name: dict(x) for name, x in vars(linear).items() if type(x) is dict})
        if "bias0" in vars(linear):  # Transformer Engine has an empty tensor for a missing bias.
            linear.__dict__.update({f"bias{i}": linear.bias0 for i in range(num_slots)})
    for name in ("quantization_padding", "quantization_unpadding"):
        if (padding := getattr(experts, name, None)) is not None:
            body._modules[name] = type(padding)(num_slots, align_size=padding.align_size)
    return body


def _unbound(linear: Any) -> Any:
    copy = _like(linear)
    copy._parameters = {}
    # Megatron's own linear layers take main_grad in the forward pass, when replicas have none.
    copy.gradient_accumulation_fusion = False
    store = getattr(linear, "wgrad_store", None)
    if store is not None:  # Delayed weight gradients wait in it; each layer needs its own.
        copy.wgrad_store = type(store)(store.delay_wgrad_compute())
    return copy


def _bind(linears: Sequence[Any], parameters: ExpertParameters, index: str) -> None:
    """Give two linear layers the weights of an expert; grouped ones have the slot's number in their names."""
    fc1, fc2, *biases = parameters
    for linear, weight, bias in zip(linears, (fc1, fc2), biases or (None, None), strict=True):
        linear._parameters[f"weight{index}"] = weight
        if bias is not None or not index:
            linear._parameters[f"bias{index}"] = bias


def _blanks_like(like: ExpertParameters) -> Iterator[ExpertParameters]:
    """Experts of zeros for empty slots, which share their memory and places for gradients that nobody reads.

    Each slot has other Parameters, because autograd adds the gradients of one that is bound several times.
    They require gradients as the others do: Transformer Engine asks the first slot's, or refuses a mixture.
    """
    sums = tuple(getattr(parameter, "main_grad", parameter).dtype for parameter in like)
    key = (ExpertLayout.of(like), like[0].device, tuple(parameter.requires_grad for parameter in like), sums)
    known = _blanks.setdefault(key, [])
    for number in count():
        if number == len(known):
            known.append(tuple(map(_blank, known[0] if known else like, repeat(bool(known)))))
        yield known[number]


def _blank(like: Any, shares: bool) -> torch.nn.Parameter:
    zeros, gradient = like.detach(), getattr(like, "main_grad", like.detach())
    if not shares:
        zeros, gradient = torch.zeros_like(zeros), torch.zeros_like(gradient)
    parameter: Any = torch.nn.Parameter(zeros, requires_grad=like.requires_grad)
    parameter.main_grad, parameter.allreduce, parameter.grad_added_to_main_grad = gradient, False, False
    if like.requires_grad:
        parameter.register_post_accumulate_grad_hook(_forget_gradient)
    return parameter


def _forget_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _structure_of(experts: Any) -> list[tuple[Any, ...]]:
    """What adapters and quantizers would change in a module: classes, names of Parameters and submodules."""
    return [(type(module), tuple(module._parameters), tuple(module._modules)) for module in experts.modules()]


def _foreign_parts(experts: Any, parameters: Sequence[ExpertParameters]) -> Iterator[str]:
    """What others than Megatron have put on experts of a module: experts that come to its slots lack it."""
    for module in experts.modules():
        if module is experts:  # Its hooks see the rows of all of its experts.
            continue
        if (method := _method_of(module)) is not None:
            yield method
        for hook in chain.from_iterable(getattr(module, table).values() for table in _HOOKS):
            # Megatron's DDP has a hook on every module. Those of megatron.training and of hosts save rows.
            origin = f"{getattr(hook, '__module__', None)}."
            if not origin.startswith(("megatron.core.", "transformer_engine.")):
                name = getattr(hook, "__qualname__", None) or type(hook).__name__
                yield f"the hook {name!r} inside of them"
    for linear in chain.from_iterable(map(_linears, getattr(experts, "local_experts", [experts]))):
        if next(linear.children(), None) is not None:
            yield f"modules inside of {type(linear).__name__} (quantizers)"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in chain(*parameters)):
        yield "hooks on their Parameters, which gradients of replicas do not pass"


def _method_of(module: Any) -> str | None:
    """What replaces the forward pass of one module alone, if anything does."""
    return f"a {type(module).__name__} with another forward pass" if "forward" in vars(module) else None


def _linears(module: Any) -> list[Any]:
    return [getattr(module, name) for name in _LINEARS]


def _like(module: Any) -> Any:
    """A module that shares everything with another one but its tables of Parameters and submodules."""
    like = object.__new__(type(module))
    like.__dict__.update(module.__dict__)
    like.__dict__["_parameters"] = dict(module._parameters)
    like.__dict__["_modules"] = dict(module._modules)
    for name in ("forward", "backward_dw"):  # The layer has put its own in the place of the module's.
        like.__dict__.pop(name, None)
    return like
