"""What the settings of a run must have in common, beyond the kind and range of each key.

Megatron has checks of its own, which ``train`` runs before any rank starts. The rules here are those that it
lacks, reports without words, or finds too late, and those that the simulator relies on. Names of keys in
braces become the key with its section and value.
"""

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_fssdp.config.run.run_config import RunConfig

NO_CONTEXT_ON_CPU = (
    "{context_parallel_size} needs Transformer Engine's attention, which does not run on CPUs; set it to 1 "
    "or train on GPUs"
)
_TP, _PP, _EP = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))
_OF_DATA = {
    *("data_path", "split", "mock_data", "vocab_size"),
    *("tokenizer_type", "tokenizer_model", "null_tokenizer_eod_id"),
}


def problems(run: "RunConfig") -> Iterator[str]:
    """Yield a text of one line for everything in a run that contradicts something else."""
    shown = {**shown_keys(run), "strategy": f"strategy '{run.strategy.name}'"}
    for rules in (_bert, _ranks, _model, _experts, _training, _data):
        yield from (text.format_map(shown) for text in rules(run))


def shown_keys(run: "RunConfig") -> dict[str, str]:
    """Return every key of Megatron's arguments with its section and value, by name."""
    return {
        name: f"{part}.{name} {value if isinstance(value, str) else json.dumps(value, default=str)}"
        for part in ("model", "parallelism", "training")
        for name, value in getattr(run, part)
    }


def _model(run: "RunConfig") -> Iterator[str]:
    model, layers = run.model, run.model.moe_layer_freq
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    heads, latent = model.num_attention_heads, model.multi_latent_attention
    if model.kv_channels is None and not latent and model.hidden_size % heads:
        yield "{num_attention_heads} does not divide {hidden_size}; change one of them, or set kv_channels"
    if model.group_query_attention and heads % model.num_query_groups:
        yield "{num_query_groups} does not divide {num_attention_heads}; change one of the two"
    if model.num_query_groups > 1 and not model.group_query_attention:
        yield "{num_query_groups} has no effect without model.group_query_attention; set it to true"
    if latent and (model.position_embedding_type != "rope" or model.add_bias_linear):
        yield "{multi_latent_attention} needs position_embedding_type rope and no add_bias_linear; set them"
    if model.moe_shared_expert_intermediate_size is not None and model.add_bias_linear:
        yield "{add_bias_linear}: Megatron has no biases in shared experts; set it to false"
    if model.moe_router_load_balancing_type == "none" and model.moe_aux_loss_coeff:
        yield "{moe_aux_loss_coeff} has no effect with {moe_router_load_balancing_type}; change one of them"
    if isinstance(layers, tuple) and len(layers) != model.num_layers:
        yield f"model.moe_layer_freq lists {len(layers)} layers, wanted {{num_layers}}; give 0 or 1 for each"
    if (groups is None) != (chosen is None):
        yield "{moe_router_num_groups} and {moe_router_group_topk}: got only one of them; set both or neither"
    if chosen is not None and model.moe_router_topk % chosen:
        yield "{moe_router_group_topk} does not divide {moe_router_topk}; change one of the two"


def _bert(run: "RunConfig") -> Iterator[str]:
    model = run.model
    if model.family != "bert":
        return
    if model.position_embedding_type not in ("learned_absolute", "rope"):
        yield "{position_embedding_type}: Megatron's BERT has only learned_absolute or rope; set one of them"
    if model.rotary_base != 10000:
        yield "{rotary_base}: Megatron's BERT supports only 10000; remove the key"
    for name in ("qk_layernorm", "multi_latent_attention", "window_size", "mtp_num_layers"):
        if getattr(model, name, None):
            yield f"{{{name}}}: Megatron's BERT does not have this; remove the key"
    if run.parallelism.context_parallel_size > 1:
        yield "{context_parallel_size}: Megatron's BERT has no context parallelism; set it to 1"


def _training(run: "RunConfig") -> Iterator[str]:
    training, data = run.training, run.parallelism.data_parallel_size
    if run.global_batch_size % (training.micro_batch_size * data):
        yield (
            f"{{global_batch_size}} is not a multiple of {{micro_batch_size}} × data parallel size {data}; "
            "every rank processes whole micro-batches, so change one of the sizes"
        )
    if training.lr_warmup_iters >= training.train_iters:
        yield "{lr_warmup_iters} must be smaller than {train_iters}; lower it"
    if training.min_lr > training.lr:
        yield "{min_lr} is larger than {lr}; lower min_lr"
    if training.bf16 and training.fp16:
        yield "{bf16} and {fp16} exclude each other; set one of them to false"
    start, end = training.profile_step_start, training.profile_step_end
    if training.profile and not start < end <= training.train_iters:
        yield "{profile_step_end}: wanted more than {profile_step_start} and up to {train_iters}; change it"


def _ranks(run: "RunConfig") -> Iterator[str]:
    cut = run.parallelism
    ranks = f"{cut.world_size} ranks ({cut.nproc_per_node} × {cut.num_nodes} machines)"
    tensor, pipeline = cut.tensor_model_parallel_size, cut.pipeline_model_parallel_size
    attention = {_TP: tensor, _PP: pipeline, "context_parallel_size": cut.context_parallel_size}
    experts = {
        _EP: cut.expert_model_parallel_size,
        "expert_tensor_parallel_size": cut.expert_tensor_size,
        _PP: pipeline,
    }
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
    if cut.sequence_parallel and tensor == 1:
        yield f"{{sequence_parallel}} needs parallelism.{_TP} of 2 or more; set it"
    if cut.sequence_parallel and run.model.seq_length % tensor:
        yield f"{{{_TP}}} does not divide {{seq_length}}, as sequence_parallel needs; change one of them"
    if cut.context_parallel_size > 1 and run.training.device == "cpu":
        yield NO_CONTEXT_ON_CPU


def _experts(run: "RunConfig") -> Iterator[str]:
    model, cut, name = run.model, run.parallelism, run.strategy.name
    if model.num_experts is None:
        if cut.expert_model_parallel_size > 1 or name != "none":
            what = f"{{{_EP}}}" if cut.expert_model_parallel_size > 1 else "{strategy}"
            yield f"{what} needs an MoE model, but this model is dense; set model.num_experts"
        return
    if model.moe_router_topk > model.num_experts:
        yield "{moe_router_topk} is larger than {num_experts}; lower moe_router_topk"
    if model.num_experts % cut.expert_model_parallel_size:
        yield f"{{{_EP}}} does not divide {{num_experts}}; every rank owns as many, so change one of them"
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
