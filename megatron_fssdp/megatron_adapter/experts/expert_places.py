"""Where the Parameters of each expert are in Megatron's expert module, and what else is in it.

An expert's Parameters are those of its two linear layers. Hosts put adapters beside them (LoRA)::

    linear_fc1                          as Megatron builds it
    linear_fc1.to_wrap, .adapter        with an adapter of Megatron-Bridge
    linear_fc1.base_layer, .lora_A, …   with one of mcore-bridge

Adapters of an expert travel with it. One that a layer's experts share stays on each rank. What else somebody
has put into experts is refused, because the experts that come to slots lack it.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import chain, count, repeat
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.all_ranks import of_all_ranks
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters

LINEARS = ("linear_fc1", "linear_fc2")
# Linear layers with adapters, and where they have the one of Megatron; and an adapter beside it that may be
# one for all experts. Of other classes, nobody knows here what they do.
_ADAPTED = {
    "megatron.bridge.peft.lora_layers.LoRALinear": "to_wrap",
    "megatron.bridge.peft.canonical_lora.LoRALinearSplitFC1UpGate": "to_wrap",
    "mcore_bridge.tuners.lora.LoraParallelLinear": "base_layer",
}
# ms-swift lets adapters move their input to the device of their weights, where it already is.
_KNOWN_METHODS = ("swift.tuners.peft.keep_device_forward",)
_BASE = rf"\.({'|'.join(_ADAPTED.values())})$"
_SHARED = "megatron.bridge.peft.utils.ParallelLinearAdapter"
_SHARED_SPREAD = 1e-3  # More than rounding, as a part of the largest value.
_LEAVE_OUT = "leave experts out of the target modules of LoRA adapters, or use --moe-strategy none"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Place(NamedTuple):
    """Where one Parameter of each expert is: in a layer inside of the expert, or of grouped experts."""

    layer: str
    name: str  # Grouped layers add the number of the expert.


class ExpertPlaces:
    """The Parameters of the experts in Megatron's module, and the places at which they are in each expert.

    A place that is frozen in all experts of the ``group``'s ranks comes after the others. The module is
    ``SequentialMLP``, or ``TEGroupedMLP`` with one weight tensor for each expert. Another one, and what this
    class does not know inside of it, are a ConfigurationError.
    """

    def __init__(self, module: Any, num_experts: int, group: dist.ProcessGroup | None = None) -> None:
        self.module = module  # It stays as it is.
        places = _places(module, num_experts)
        tensors_of_place = zip(*_parameters_at(places, module, num_experts), strict=True)
        own = [any(tensor.requires_grad for tensor in tensors) for tensors in tensors_of_place]
        self._scales = _scales_of(module)
        facts = of_all_ranks((own, self._scales), group) if group else [(own, self._scales)]
        if len(set(chain(*(of_rank for _, of_rank in facts)))) > 1:
            raise ConfigurationError(
                "experts: got LoRA adapters with several scales (alpha) in a layer, wanted one, because "
                f"replicas have that of their device; give all experts one, or {_LEAVE_OUT}"
            )
        trained = [any(flags) for flags in zip(*(of_rank for of_rank, _ in facts), strict=True)]
        order = sorted(range(len(places)), key=lambda number: not trained[number])
        self.places, self.num_trained = [places[number] for number in order], sum(trained)
        self.parameters = _parameters_at(self.places, module, num_experts)  # as Megatron registered them
        shared = (part.parameters() for part in module.modules() if is_shared(part))
        known = {id(tensor) for tensor in chain(*self.parameters, *shared)}
        others = [name for name, p in module.named_parameters() if id(p) not in known and p.numel()]
        if others:
            raise ConfigurationError(
                f"experts: got {others[0]} beside the weights and biases of linear_fc1 and linear_fc2, "
                "wanted no other Parameters but those of LoRA adapters for each expert, or of one for those "
                "of all ranks, because only these are in slots; set Megatron-Bridge's share_expert_adapters "
                f"and not experts_shared_outer_loras (0.6.2), {_LEAVE_OUT}"
            )
        _refuse(_method_of(module) or next(self._foreign_parts(), None))
        self._structure = _structure_of(module)
        if len(dtypes := sorted({str(tensor.dtype) for tensor in chain(*self.parameters)})) > 1:
            raise ConfigurationError(
                f"experts: got weights of the data types {' and '.join(dtypes)}, wanted one for all, because "
                f"an expert travels as one tensor; give LoRA adapters the model's data type, or {_LEAVE_OUT}"
            )

    @property
    def kind(self) -> tuple[Any, ...]:
        """What experts of two layers have in common that can take each other's place."""
        places = [(re.sub(_BASE, "", layer), name) for layer, name in self.places]
        # Grouped experts compute by the layers of their own module, others by those that their places have.
        return places, self._scales if hasattr(self.module, "local_experts") else None

    def layers(self, expert: Any) -> list[Any]:
        """The layers of an expert, or of grouped experts, that have the Parameters of the places."""
        return [expert.get_submodule(place.layer) for place in self.places]

    def bind(self, layers: Sequence[Any], parameters: Sequence[Tensor], index: str) -> None:
        """Give layers the Parameters of an expert; grouped ones have the slot's number in their names."""
        for layer, place, parameter in zip(layers, self.places, parameters, strict=True):
            layer._parameters[f"{place.name}{index}"] = parameter

    def check_unchanged(self, module: Any) -> None:
        """Refuse, by a ConfigurationError, a layer's module that was changed or replaced since then."""
        change, tensors = None, [*chain(*self.parameters)]
        if module is not self.module:
            change = f"a {type(module).__name__} in the place of the expert module"
        elif hasattr(tensors[0], "__fsdp_param__"):
            change = "Megatron-FSDP in the place of Megatron's DDP"
        elif _structure_of(module) != self._structure:
            change = "linear layers that were wrapped or replaced (LoRA adapters, quantizers)"
        else:
            now = chain(*_parameters_at(self.places, module, len(self.parameters)))
            if any(tensor is not known for tensor, known in zip(now, tensors, strict=True)):
                change = "Parameters that were replaced (meta device, new weights)"
            # A pass of a reference may select frozen adapters, which peft then marks as trained.
            elif torch.is_grad_enabled() and any(
                tensor.requires_grad for of in self.parameters for tensor in of[self.num_trained :]
            ):
                change = "Parameters that are trained, and were frozen when DDP wrapped the model"
        _refuse(change or next(self._foreign_parts(), None))

    def check_shared(self, group: dist.ProcessGroup) -> None:
        """Refuse, by a ConfigurationError, an adapter for all experts with other values on other ranks.

        Collective over the group. Megatron-Bridge 0.5 begins each rank's with values of its own.
        """
        shared = filter(is_shared, self.module.modules())
        flat = [tensor.detach().float().flatten() for part in shared for tensor in part.parameters()]
        if not flat:
            return
        bounds = torch.stack((torch.cat(flat), -torch.cat(flat)))
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
        if bounds.sum(dim=0).max() > _SHARED_SPREAD * bounds.max():
            raise ConfigurationError(
                "experts: got a LoRA adapter for all experts whose values differ between ranks, wanted equal "
                "ones, because replicas have that of their device; update Megatron-Bridge (0.6.2), or "
                f"{_LEAVE_OUT}"
            )

    def _foreign_parts(self) -> Iterator[str]:
        """What others than Megatron have put on experts: those that come to their slots lack it."""
        for module in self.module.modules():
            if module is self.module:  # Its hooks see the rows of all of its experts.
                continue
            if (method := _method_of(module)) is not None:
                yield method
            for hook in chain.from_iterable(getattr(module, table).values() for table in _HOOKS):
                # Megatron's DDP has hooks on all modules. Those of megatron.training and of hosts save rows.
                origin = f"{getattr(hook, '__module__', None)}."
                if not origin.startswith(("megatron.core.", "transformer_engine.")):
                    name = getattr(hook, "__qualname__", None) or type(hook).__name__
                    yield f"the hook {name!r} inside of them"
        experts = getattr(self.module, "local_experts", [self.module])
        for layer in chain.from_iterable(map(self.layers, experts)):
            if next(layer.children(), None) is not None:
                yield f"modules inside of {type(layer).__name__} (quantizers)"
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in chain(*self.parameters)):
            yield "hooks on their Parameters, which gradients of replicas do not pass"


def expert_parameters(experts: Any, num_experts: int) -> list[ExpertParameters]:
    """Return the Parameters of each local expert of a module, in the order of ``ExpertParameters``."""
    return _parameters_at(_places(experts, num_experts), experts, num_experts)


def is_adapted(layer: Any) -> bool:
    """Whether this is a linear layer with an adapter."""
    return _class_of(layer) in _ADAPTED


def is_shared(module: Any) -> bool:
    """Whether this is an adapter for all experts of a layer, whose gradients the host sums over ranks."""
    # Older versions do not sum them, so that each rank has another one.
    sums = getattr(module, "_allreduce_shared_expert_grad", None)
    return _class_of(module) == _SHARED and sums is not None and module._uses_grouped_expert_sharding()


def _places(experts: Any, num_experts: int) -> list[Place]:
    """The places of an expert's Parameters: weights before biases, those of both base layers first."""
    is_grouped = not hasattr(experts, "local_experts")
    first, places, whole = experts if is_grouped else experts.local_experts[0], list[Place](), set[str]()
    for path, layer in first.named_modules():
        if path not in LINEARS and not is_adapted(getattr(first, path.split(".")[0], None)):
            continue
        if is_grouped and getattr(layer, "num_gemms", None) != num_experts:
            continue
        # Transformer Engine stores an empty tensor instead of a missing bias.
        names = [name for name, tensor in layer.named_parameters(recurse=False) if tensor.numel()]
        if is_grouped:
            names = [name[:-1] for name in names if name in ("weight0", "bias0")]
        places += [Place(path, name) for name in names]
    for linear in LINEARS:
        layer = getattr(first, linear, None)
        base = f"{linear}.{_ADAPTED.get(_class_of(layer), '')}".rstrip(".")
        if Place(base, "weight") not in places:
            raise ConfigurationError(
                f"expert module: got {type(experts).__name__} with {type(layer).__name__} as {linear}, "
                "wanted SequentialMLP or TEGroupedMLP as Megatron's MoE specs build them, with weights of "
                f"each expert, perhaps with LoRA adapters of Megatron-Bridge or mcore-bridge; {_LEAVE_OUT}"
            )
        whole.add(base)
    return sorted(places, key=lambda place: (place.name == "bias", place.layer not in whole))


def _parameters_at(places: Sequence[Place], experts: Any, num_experts: int) -> list[ExpertParameters]:
    mlps = getattr(experts, "local_experts", repeat(experts, num_experts))
    indices = repeat("") if hasattr(experts, "local_experts") else map(str, count())
    try:
        return [
            tuple(mlp.get_parameter(f"{layer}.{name}{index}") for layer, name in places)
            for mlp, index in zip(mlps, indices, strict=False)
        ]
    except AttributeError as error:
        raise ConfigurationError(
            f"experts: got {error} in one of them, wanted the same layers in all; {_LEAVE_OUT}"
        ) from None


def _refuse(change: str | None) -> None:
    if change is not None:
        raise ConfigurationError(
            f"experts: got {change}, wanted those that Megatron builds, because slots hold other experts "
            "and copies of experts; put hooks, which see rows by slot, on the whole expert module, copy "
            "values into Parameters, or use --moe-strategy none"
        )


def _structure_of(experts: Any) -> list[tuple[Any, ...]]:
    """What adapters and quantizers would change in a module: classes, names of Parameters and submodules."""
    return [(type(module), tuple(module._parameters), tuple(module._modules)) for module in experts.modules()]


def _scales_of(experts: Any) -> set[tuple[tuple[str, str], ...]]:
    """By what the adapters of an expert multiply their output, by path; one element if experts are alike."""

    def scales(expert: Any) -> Iterator[tuple[str, str]]:
        for path, part in expert.named_modules():
            if (scale := getattr(part, "scaling", getattr(part, "alpha", None))) is not None:
                yield path, str(scale)

    return {tuple(scales(expert)) for expert in getattr(experts, "local_experts", [experts])}


def _method_of(module: Any) -> str | None:
    """What replaces the forward pass of one module alone, if anything does."""
    method = vars(module).get("forward")
    if method is None or f"{method.__module__}.{method.__qualname__}" in _KNOWN_METHODS:
        return None
    return f"a {type(module).__name__} with another forward pass"


def _class_of(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
