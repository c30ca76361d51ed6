"""Stand-ins for LoRA adapters that hosts put into experts, with the names of their classes and layers."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from .grouped_linear import GroupedLinear

RANK = 3


class LoraParallelLinear(torch.nn.Module):
    """A linear layer of mcore-bridge with an adapter for each expert, in layers of its own."""

    def __init__(self, base, down, up):
        super().__init__()
        self.base_layer, self.is_off = base, False
        self.lora_A = torch.nn.ModuleDict({"default": down})
        self.lora_B = torch.nn.ModuleDict({"default": up})

    def forward(self, x, *splits):
        output, bias = self.base_layer(x, *splits)
        if self.is_off:
            return output, bias
        down, _ = self.lora_A["default"](x, *splits)
        return output + 2 * self.lora_B["default"](down, *splits)[0], bias


class ParallelLinearAdapter(torch.nn.Module):
    """An adapter of Megatron-Bridge: of one expert, or of all, which then have the same gradients."""

    def __init__(self, down, up, is_shared):
        super().__init__()
        self.linear_in, self.linear_out, self.is_shared = down, up, is_shared
        for parameter in self.parameters() if is_shared else ():
            parameter.register_hook(self._allreduce_shared_expert_grad)

    def _allreduce_shared_expert_grad(self, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=parallel_state.get_expert_model_parallel_group())
        return total

    def _uses_grouped_expert_sharding(self):
        return self.is_shared

    def forward(self, x):
        return self.linear_out(self.linear_in(x)[0])[0]


class LoRALinear(torch.nn.Module):
    """A linear layer of Megatron-Bridge with an adapter."""

    def __init__(self, base, adapter):
        super().__init__()
        self.to_wrap, self.adapter, self.is_off = base, adapter, False

    def forward(self, x, *splits):
        output, bias = self.to_wrap(x, *splits)
        return (output if self.is_off else output + 2 * self.adapter(x)), bias


LoraParallelLinear.__module__ = "mcore_bridge.tuners.lora"
ParallelLinearAdapter.__module__ = "megatron.bridge.peft.utils"
LoRALinear.__module__ = "megatron.bridge.peft.lora_layers"


class _Linear(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x), None


def adapt(experts, host, *, fuses=False):
    """Freeze a module's experts, and put adapters of ``bridge`` or ``mcore_bridge`` into them."""
    experts.requires_grad_(False)
    for mlp in getattr(experts, "local_experts", [experts]):
        for name in ("linear_fc1", "linear_fc2"):
            base = getattr(mlp, name)
            is_grouped = isinstance(base, GroupedLinear)
            size_out, size_in = (base.weight0 if is_grouped else base.weight).shape
            sizes = (size_in, RANK), (RANK, size_out)
            if is_grouped and host == "mcore_bridge":
                how = {"bias": False, "pg_collection": base.groups, "config": experts.config, "shard_axis": 0}
                how |= {"init_method": torch.nn.init.normal_, "skip_bias_add": False, "fuses": fuses}
                layers = [GroupedLinear(base.num_gemms, *size, **how) for size in sizes]
            else:
                layers = [_of_experts(_Linear(*size, bias=False)) for size in sizes]
            if host == "bridge":
                adapted = LoRALinear(base, ParallelLinearAdapter(*layers, is_grouped))
            else:
                adapted = LoraParallelLinear(base, *layers)
            setattr(mlp, name, adapted)


def make_shared_equal(experts):
    """Give adapters for all experts the same values on all ranks, as Megatron-Bridge does."""
    for module in experts.modules():
        if getattr(module, "is_shared", False):
            for parameter in module.parameters():
                dist.broadcast(parameter.data, 0)


def _of_experts(layer):
    for parameter in layer.parameters():
        parameter.allreduce = parallel_state.get_expert_model_parallel_world_size() == 1
    return layer
