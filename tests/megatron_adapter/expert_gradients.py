"""Gradients of every expert, as the optimizer gets them, by layer and expert instead of by Parameter."""

import math

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.training import training

from megatron_fssdp.megatron_adapter.experts.expert_places import expert_parameters
from megatron_fssdp.megatron_adapter.wrapping import wrap

SMALL = 0.01  # Gradients below this share of an iteration's largest one may differ by that share's rounding.

# Norms by the layer, the expert, its matrix or bias, and the rank that has this part of it.
Norms = dict[tuple[str, int, int, int], float]


def record(norms):
    """On a rank, add the norms of this rank's experts at each step of the optimizer."""

    def recorded(setup, *args, **kwargs):
        model, optimizer, scheduler = setup(*args, **kwargs)
        if optimizer is not None:  # A run that only evaluates has none.
            wrap(optimizer, "step", lambda step: norms.append(_norms(model)) or step())
        return model, optimizer, scheduler

    wrap(training, "setup_model_and_optimizer", recorded)


def assert_close(got, wanted, bound):
    """Check the relative differences in each iteration; an overflow of fp16 must be in both runs."""
    assert len(got) == len(wanted) > 0
    for iteration, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert ours.keys() == theirs.keys()
        small = SMALL * max(filter(math.isfinite, theirs.values()), default=0.0)
        for key, norm in theirs.items():
            is_close = abs(ours[key] - norm) <= bound * max(norm, small)
            assert is_close or not (math.isfinite(norm) or math.isfinite(ours[key])), (
                f"step {iteration}, (layer, expert, matrix, part) {key}: got {ours[key]}, wanted {norm}"
            )


def _norms(model):
    experts, part = dict(owned_experts(model)), parallel_state.get_expert_tensor_parallel_rank()
    gradients = _reduced(model, {parameter for parameters in experts.values() for parameter in parameters})
    return {
        (*place, matrix, part): float(torch.linalg.vector_norm(gradients[parameter], dtype=torch.float64))
        for place, parameters in experts.items()
        for matrix, parameter in enumerate(filter(lambda parameter: parameter.requires_grad, parameters))
    }


def owned_experts(model):
    """Yield layer, number and Parameters of the experts that this rank owns, wherever they are."""
    for name, layer in (named for chunk in model for named in chunk.named_modules()):
        if isinstance(layer, MoELayer):
            # Megatron numbers the layers of multi-token prediction from 1 again.
            number = name[name.index("mtp.") :] if "mtp." in name else str(layer.layer_number)
            own = expert_parameters(layer.experts, layer.num_local_experts)
            experts = dict(zip(layer.local_expert_indices, own, strict=True))
            if hasattr(layer, "slot_layer"):
                experts = layer.slot_layer.local.experts.parameters
            yield from (((number, expert), parameters) for expert, parameters in experts.items())


def _reduced(model, owned):
    """Whole gradients. With a distributed optimizer, each rank has the sums of its own shard of a bucket."""
    gradients = {}
    for group in (
        group for chunk in model for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    ):
        for bucket in (bucket for bucket in group.buckets if not owned.isdisjoint(bucket.params)):
            whole = bucket.grad_data
            if group.ddp_config.use_distributed_optimizer:
                ranks = group.intra_distributed_optimizer_instance_group
                shard = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                whole = torch.empty_like(bucket.grad_data)
                dist.all_gather_into_tensor(whole, shard, group=ranks)
            gradients |= {weight: whole[slice(*place)] for weight, place in bucket.param_to_index.items()}
    return gradients
