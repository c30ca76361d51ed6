"""What the settings of a run must have in common, beyond the kind and range of each key.

Texts have names of keys in braces, each of which becomes the key with its section and value.
"""

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_fssdp.config.run.sections import ModelArguments, ParallelismArguments, TrainingArguments

if TYPE_CHECKING:
    from megatron_fssdp.config.run.run_config import RunConfig

NO_CONTEXT_ON_CPU = (
    "{context_parallel_size} needs Transformer Engine's attention, which does not run on CPUs; set it to 1 "
    "or train on GPUs"
)
_TP, _PP, _EP = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))
_VPP, _ETP = "num_virtual_stages_per_pipeline_rank", "expert_tensor_parallel_size"
_UNEVEN_STAGES = {
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_per_virtual_pipeline_stage",
}
"""Megatron's arguments for pipeline stages with different numbers of layers."""

_OF_DATA = {
    *("data_path", "split", "mock_data", "vocab_size"),
    *("tokenizer_type", "tokenizer_model", "null_tokenizer_eod_id"),
}


def problems(run: "RunConfig") -> Iterator[str]:
    """Yield a text of one line for everything in a run that contradicts something else."""
    shown = {**shown_keys(run), "strategy": f"strategy '{run.strategy.name}'"}
    for rules in (
        _ranks(run.parallelism),
        _attention(run.model),
        _router(run.model),
        _training(run.training),
        _experts(run),
        _layout(run),
        _data(run),
    ):
        yield from (text.format_map(shown) for text in rules)


def shown_keys(run: "RunConfig") -> dict[str, str]:
    """Return every key of Megatron's arguments with its section and value, by name."""
    return {
        name: f"{part}.{name} {value if isinstance(value, str) else json.dumps(value, default=str)}"
        for part in ("model", "parallelism", "training")
        for name, value in getattr(run, part)
    }


def _divides(part: str, whole: str, values: Any, also: Any = None, why: str = "") -> Iterator[str]:
    if getattr(also or values, whole) % getattr(values, part):
        yield f"{{{part}}} does not divide {{{whole}}}; {why}change one of the two"


def _ranks(cut: ParallelismArguments) -> Iterator[str]:
    ranks = f"{cut.world_size} ranks ({cut.nproc_per_node} × {cut.num_nodes} machines)"
    pipeline, tensor = cut.pipeline_model_parallel_size, cut.tensor_model_parallel_size
    attention = {_TP: tensor, _PP: pipeline, "context_parallel_size": cut.context_parallel_size}
    experts = {_EP: cut.expert_model_parallel_size, _ETP: cut.expert_tensor_size, _PP: pipeline}
    for sizes in (attention, experts):
        product = math.prod(sizes.values())
        if cut.world_size % product:
            factors = " × ".join(f"{name} {size}" for name, size in sizes.items())
            yield (
                f"parallelism: {factors} = {product} does not divide the {ranks}; change --nproc "
                "(nproc_per_node) or the sizes"
            )
    if cut.declared_nodes is not None and cut.world_size % cut.declared_nodes:
        yield f"{{declared_nodes}} does not divide the {ranks}, but nodes are equal; change one of the two"
    if cut.num_virtual_stages_per_pipeline_rank is not None and pipeline == 1:
        yield f"{{{_VPP}}} needs parallelism.{_PP} of 2 or more; set it"
    if cut.sequence_parallel and tensor == 1:
        yield f"{{sequence_parallel}} needs parallelism.{_TP} of 2 or more; set it"
    if cut.overlap_param_gather and not (cut.use_distributed_optimizer and cut.overlap_grad_reduce):
        yield "{overlap_param_gather} needs use_distributed_optimizer and overlap_grad_reduce; set them"


def _attention(model: ModelArguments) -> Iterator[str]:
    latent = model.multi_latent_attention
    if model.kv_channels is None and not latent:
        why = "set kv_channels, the width of a head, or "
        yield from _divides("num_attention_heads", "hidden_size", model, why=why)
    if model.group_query_attention:
        yield from _divides("num_query_groups", "num_attention_heads", model)
    elif model.num_query_groups > 1:
        yield "{num_query_groups} has no effect without model.group_query_attention; set it to true"
    if latent and (model.group_query_attention or model.kv_channels is not None):
        yield "{multi_latent_attention} excludes {group_query_attention} and {kv_channels}; remove these keys"
    if latent and model.position_embedding_type != "rope":
        yield "{position_embedding_type}: multi_latent_attention supports only rope; set it to rope"
    if latent and model.add_bias_linear:
        yield "{add_bias_linear}: multi_latent_attention has no biases; set it to false"
    if model.family != "bert":
        return
    if model.position_embedding_type not in ("learned_absolute", "rope"):
        yield "{position_embedding_type}: Megatron's BERT has only learned_absolute or rope; set one of them"
    if model.rotary_base != 10000:
        yield "{rotary_base}: Megatron's BERT supports only 10000; remove the key"
    for name in ("qk_layernorm", "multi_latent_attention", "window_size", "mtp_num_layers"):
        if getattr(model, name):
            yield f"{{{name}}}: Megatron's BERT does not have this; remove the key"


def _router(model: ModelArguments) -> Iterator[str]:
    groups, chosen, layers = model.moe_router_num_groups, model.moe_router_group_topk, model.moe_layer_freq
    num_listed = len(layers) if isinstance(layers, tuple) else model.num_layers
    if model.num_experts is not None and model.moe_router_topk > model.num_experts:
        yield "{moe_router_topk} is larger than {num_experts}; lower moe_router_topk"
    if model.moe_shared_expert_intermediate_size is not None and model.add_bias_linear:
        yield "{add_bias_linear}: Megatron has no biases in shared experts; set it to false"
    if model.moe_router_load_balancing_type == "none" and model.moe_aux_loss_coeff:
        yield "{moe_aux_loss_coeff} has no effect with {moe_router_load_balancing_type}; change one of them"
    if num_listed != model.num_layers:
        yield f"model.moe_layer_freq lists {num_listed} layers, wanted {{num_layers}}; give 0 or 1 for each"
    if isinstance(layers, int) and layers < 1:
        yield f"model.moe_layer_freq: got {layers}, wanted 1 or more"
    if model.moe_router_enable_expert_bias and model.moe_router_score_function == "softmax":
        yield "{moe_router_enable_expert_bias} excludes {moe_router_score_function}; set that to sigmoid"
    if (groups is None) != (chosen is None):
        yield "{moe_router_num_groups} and {moe_router_group_topk}: got only one of them; set both or neither"
    if groups is not None and chosen is not None:
        if (model.num_experts or 0) % groups or chosen > groups:
            yield "{moe_router_num_groups}: wanted a divisor of {num_experts} from {moe_router_group_topk}"
        yield from _divides("moe_router_group_topk", "moe_router_topk", model)


def _training(training: TrainingArguments) -> Iterator[str]:
    if training.global_batch_size is not None:
        yield from _divides("micro_batch_size", "global_batch_size", training)
    if training.lr_warmup_iters >= training.train_iters:
        yield "{lr_warmup_iters} must be smaller than {train_iters}; lower it"
    if training.min_lr > training.lr:
        yield "{min_lr} is larger than {lr}; lower min_lr"
    if training.bf16 and training.fp16:
        yield "{bf16} and {fp16} exclude each other; set one of them to false"
    if training.profile and training.profile_step_end <= training.profile_step_start:
        yield "{profile_step_end} is not after {profile_step_start}; raise it"
    if training.profile and training.profile_step_end > training.train_iters:
        yield "{profile_step_end} is larger than {train_iters}, so no trace would be written; lower it"


def _layout(run: "RunConfig") -> Iterator[str]:
    model, cut, training = run.model, run.parallelism, run.training
    context, data = cut.context_parallel_size, cut.data_parallel_size
    chunks = cut.pipeline_model_parallel_size * (cut.num_virtual_stages_per_pipeline_rank or 1)
    heads = "every tensor-parallel rank holds whole heads, so "
    yield from _divides(_TP, "num_attention_heads", cut, model, heads)
    if model.group_query_attention:
        yield from _divides(_TP, "num_query_groups", cut, model, heads)
    if model.num_layers % chunks and not _UNEVEN_STAGES.intersection(shown_keys(run)):
        yield (
            f"{{num_layers}} cannot be divided into {chunks} equal pipeline chunks ({_PP} × {_VPP}); change "
            "one of these values, or describe unequal chunks, as with pipeline_model_parallel_layout"
        )
    if cut.sequence_parallel:
        yield from _divides(_TP, "seq_length", cut, model, "sequence_parallel needs that, so ")
    if context > 1 and model.seq_length % (2 * context):
        yield "{seq_length} is not a multiple of 2 × {context_parallel_size}; change one of the two"
    if run.global_batch_size % (training.micro_batch_size * data):
        yield (
            f"{{global_batch_size}} is not a multiple of {{micro_batch_size}} × data parallel size {data}; "
            "every rank processes whole micro-batches, so change one of the sizes"
        )
    if context > 1 and model.family == "bert":
        yield "{context_parallel_size}: Megatron's BERT has no context parallelism; set it to 1"
    if context > 1 and training.device == "cpu":
        yield NO_CONTEXT_ON_CPU


def _experts(run: "RunConfig") -> Iterator[str]:
    model, cut, name = run.model, run.parallelism, run.strategy.name
    if model.num_experts is None:
        if cut.expert_model_parallel_size > 1 or name != "none":
            what = f"{{{_EP}}}" if cut.expert_model_parallel_size > 1 else "{strategy}"
            yield f"{what} needs an MoE model, but this model is dense; set model.num_experts"
        return
    yield from _divides(_EP, "num_experts", cut, model, "every rank owns as many experts, so ")
    if cut.expert_tensor_size > 1 and model.add_bias_linear:
        yield (
            f"{{add_bias_linear}}: Megatron has no biases in experts that are split over ranks ({_ETP} "
            f"{cut.expert_tensor_size}); set it to false, or {_ETP} to 1"
        )
    if cut.tensor_model_parallel_size > 1 and not cut.sequence_parallel and name == "none":
        yield (
            f"{{{_TP}}} in an MoE model needs parallelism.sequence_parallel: true under {{strategy}}, "
            "because Megatron itself needs it; set it, or choose another strategy"
        )


def _data(run: "RunConfig") -> Iterator[str]:
    tokenizer, family = run.data.tokenizer, run.model.family
    for name in () if run.data.external else _OF_DATA.intersection(run.megatron_values()):
        yield f"{{{name}}} follows from the section data; change that, or set data.external to true"
    is_built = not run.data.external and run.data.path is None  # a folder's data is checked when it is read
    if is_built and (tokenizer == "wordpiece") != (family == "bert"):
        yield (
            f"data.tokenizer {tokenizer} does not fit model.family {family}: bert trains on sentences in "
            "wordpiece, gpt trains on whole texts in bpe or bytes; set data.tokenizer to "
            f"{'wordpiece' if family == 'bert' else 'bpe'}"
        )
