"""A stand-in for Transformer Engine's grouped linear layer, with its interface and without its kernels.

Its sharded state dict follows ``TEGroupedLinear._sharded_state_dict_grouped`` of megatron-core 0.19.

Its passes keep the contract of Transformer Engine's ``GroupedLinear`` as published (2.20): a missing bias is
an empty tensor; with ``fuse_wgrad_accumulation`` the weights' gradients are added to ``main_grad`` of the
tensors that the module had in its forward pass, which must still be alive, or overwrite it in the first
micro-batch; autograd then gets no gradient, or a tensor without meaning if the weight has
``grad_added_to_main_grad``. Copies of weights stay in ``_fp8_workspaces`` unless ``is_first_microbatch`` is
``None``.
"""

import dataclasses
import weakref
from functools import partial

import torch


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m_splits, fuses, is_first_microbatch, adds_bias, store, *weights_and_biases):
        weights = weights_and_biases[: len(m_splits)]
        biases = weights_and_biases[len(m_splits) :]
        assert len(weights) == len(biases) == len(m_splits) > 0
        ctx.save_for_backward(x, *weights)
        ctx.m_splits, ctx.fuses, ctx.adds_bias = list(m_splits), fuses, adds_bias
        ctx.accumulates, ctx.store = not is_first_microbatch, store
        ctx.weight_refs = [weakref.ref(weight) for weight in weights] if fuses else []
        outputs = [part @ weight.t() for part, weight in zip(x.split(ctx.m_splits), weights, strict=True)]
        if adds_bias:
            outputs = [output + bias for output, bias in zip(outputs, biases, strict=True)]
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx, gradient):
        x, *weights = ctx.saved_tensors
        of_weights = []
        of_x, of_biases = [], []
        parts = zip(gradient.split(ctx.m_splits), x.split(ctx.m_splits), weights, strict=True)
        for index, (part, rows, weight) in enumerate(parts):
            of_x.append(part @ weight)
            of_biases.append(part.sum(0) if ctx.adds_bias else None)
            # Transformer Engine asks the first one.
            if ctx.store.delay_wgrad_compute() or not ctx.needs_input_grad[6]:
                of_weights.append(None)
                continue
            of_weight = part.t() @ rows
            if ctx.fuses:
                original = ctx.weight_refs[index]()
                assert original is not None, "weight was removed while fuse_wgrad_accumulation=True"
                if ctx.accumulates:
                    original.main_grad.add_(of_weight)
                else:
                    original.main_grad.copy_(of_weight)
                of_weight = None
                if hasattr(original, "grad_added_to_main_grad"):
                    original.grad_added_to_main_grad = True
                    of_weight = torch.full_like(weight, torch.nan)
            of_weights.append(of_weight)
        if ctx.store.delay_wgrad_compute():
            ctx.store.waiting.append((x.split(ctx.m_splits), gradient.split(ctx.m_splits)))
        return torch.cat(of_x), None, None, None, None, None, *of_weights, *of_biases


class WeightGradStore:
    """Rows and gradients from which ``backward_dw`` computes the weights' gradients."""

    def __init__(self, delays=False):
        self._delays = delays
        self.waiting = []

    def delay_wgrad_compute(self):
        return self._delays


class GroupedLinear(torch.nn.Module):
    def __init__(
        self,
        num_gemms,
        input_size,
        output_size,
        *,
        bias,
        config,
        shard_axis=None,
        pg_collection=None,
        init_method,
        skip_bias_add,
        fuses=False,
        **unused,
    ):
        from megatron.core.process_groups_config import ProcessGroupCollection

        super().__init__()
        self.groups = pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.num_gemms, self.shard_axis, self.config = num_gemms, shard_axis, config
        self.use_bias, self.te_return_bias = bias, skip_bias_add and bias
        self.is_first_microbatch = True
        self._fp8_workspaces = {}
        self.wgrad_store = WeightGradStore(
            config.delay_wgrad_compute or config.overlap_dispatch_backward_with_experts_wgrad
        )
        self.disable_parameter_transpose_cache = config.disable_parameter_transpose_cache
        # Not config.gradient_accumulation_fusion: Megatron's dense layers refuse it on a CPU.
        self.fuse_wgrad_accumulation = fuses
        peers = pg_collection.expt_tp
        for index in range(num_gemms):
            part = torch.empty(output_size, input_size, dtype=config.params_dtype)
            init_method(part)
            if shard_axis is not None:
                part = part.chunk(peers.size(), shard_axis)[peers.rank()].contiguous()
            weight = torch.nn.Parameter(part)
            self.register_parameter(f"weight{index}", weight)
            if bias:
                zeros = torch.zeros(len(weight), dtype=config.params_dtype)
                self.register_parameter(f"bias{index}", torch.nn.Parameter(zeros))
            else:
                setattr(self, f"bias{index}", torch.empty(0, dtype=config.params_dtype))
        self.out_features, self.in_features = self.weight0.shape
        for name, parameter in self.named_parameters():
            parameter.allreduce = pg_collection.ep.size() == 1
            # Else the norm of gradients would count one part of an expert.
            parameter.tensor_model_parallel = shard_axis == 0 or (shard_axis == 1 and "weight" in name)

    def forward(self, x, m_splits):
        is_first = None if self.disable_parameter_transpose_cache else self.is_first_microbatch
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        adds_bias = self.use_bias and not self.te_return_bias
        options = self.fuse_wgrad_accumulation, is_first, adds_bias, self.wgrad_store
        output = _GroupedMatmul.apply(x, m_splits, *options, *weights, *biases)
        if is_first is not None:
            self._fp8_workspaces |= {f"weight{i}": w.detach().clone() for i, w in enumerate(weights)}
        self.is_first_microbatch = False
        return output, biases if self.te_return_bias else None

    def backward_dw(self):
        for index, (rows, gradient) in enumerate(zip(*self.wgrad_store.waiting.pop(0), strict=True)):
            weight, of_weight = getattr(self, f"weight{index}"), gradient.t() @ rows
            if self.fuse_wgrad_accumulation:
                weight.main_grad.add_(of_weight)
            else:
                weight.grad = of_weight

    def sharded_state_dict(self, prefix, sharded_offsets, metadata):
        from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        singleton = metadata.get("singleton_local_shards", False)
        parameters = dict(self.named_parameters())
        state = {}
        for index in range(self.num_gemms):
            expert = self.groups.ep.rank() * self.num_gemms + index
            axes = {} if self.shard_axis is None else {"weight": self.shard_axis}
            axes |= {"bias": 0} if self.shard_axis == 0 else {}
            total = self.groups.ep.size() * self.num_gemms
            offsets = sharded_offsets
            if not singleton:
                offsets = (*sharded_offsets, (len(sharded_offsets), expert, total))
            names = ("weight", "bias") if f"bias{index}" in parameters else ("weight",)
            local = {name: parameters[f"{name}{index}"] for name in names}
            entries = make_sharded_tensors_for_checkpoint(
                {**local, "_extra_state": torch.empty(0, dtype=torch.uint8)},
                "",
                axes,
                offsets,
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(entries, "", f"{expert}.{prefix}" if singleton else prefix)
            for name, entry in entries.items():
                entry.replica_id = (*entry.replica_id[:2], self.groups.expt_dp.rank())
                is_first_extra = name == "_extra_state" and index == 0
                state[f"{prefix}{name}{'' if is_first_extra else index}"] = entry
        return state


def grouped_experts(*, fuses=False):
    """Builder of Megatron's grouped experts with stand-ins, which may add gradients to ``main_grad``."""
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    linears = GroupedMLPSubmodules(
        linear_fc1=partial(GroupedLinear, shard_axis=0, fuses=fuses),
        linear_fc2=partial(GroupedLinear, shard_axis=1, fuses=fuses),
    )
    return partial(TEGroupedMLP, submodules=linears)


def fake_grouped_experts(mlp, *, fuses=False):
    """Submodules of a layer with :func:`grouped_experts`."""
    return dataclasses.replace(
        mlp.keywords["submodules"], experts=grouped_experts(fuses=fuses), shared_experts=None
    )
