"""What the settings of a run must have in common, where Megatron's own checks come too late or not at all.

Megatron refuses many other contradictions by itself, before any rank starts. These rules are for what it
ignores silently, what only fails when the ranks build the model, and what the simulator computes with.
Texts have names of keys in braces, each of which becomes the key with its section and value.
"""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_fssdp.config.run.sections import ModelArguments, ParallelismArguments

if TYPE_CHECKING:
    from megatron_fssdp.config.run.run_config import RunConfig

_TP, _PP, _EP = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))
_ETP = "expert_tensor_parallel_size"

_OF_DATA = {
    *("data_path", "split", "mock_data", "vocab_size"),
    *("tokenizer_type", "tokenizer_model", "null_tokenizer_eod_id"),
}

_OF_BERT: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("learned_absolute", "rope"),
    "rotary_base": (10000,),
    "context_parallel_size": (1,),
    "qk_layernorm": (False,),
    "multi_latent_attention": (False,),
    "window_size": (None,),
    "mtp_num_layers": (None,),
}
"""The values that Megatron's BERT supports, the default among them."""


def problems(run: "RunConfig") -> Iterator[str]:
    """Yield a text of one line for everything in a run that contradicts something else."""
    given = [
        (part, name, value)
        for part in ("model", "parallelism", "training")
        for name, value in getattr(run, part)
    ]
    values = {name: value for _, name, value in given}
    shown = {
        name: f"{part}.{name} {value if isinstance(value, str) else json.dumps(value, default=str)}"
        for part, name, value in given
    }
    shown["strategy"] = f"strategy '{run.strategy.name}'"
    for rules in (
        _ranks(run.parallelism),
        _divisors(run, values),
        _model(run.model, values),
        _training(run, values),
        _experts(run),
        _data(run),
    ):
        yield from (text.format_map(shown) for text in rules)


def _ranks(cut: ParallelismArguments) -> Iterator[str]:
    experts = cut.expert_model_parallel_size * cut.expert_tensor_size * cut.pipeline_model_parallel_size
    for product, factors in (
        (cut.ranks_of_a_model, f"{{{_TP}}} × {{{_PP}}} × {{context_parallel_size}}"),
        (experts, f"{{{_EP}}} × {{{_ETP}}} × {{{_PP}}}"),
    ):
        if cut.world_size % product:
            yield (
                f"{factors} = {product} does not divide the {cut.world_size} ranks "
                "({nproc_per_node} × {num_nodes}); change --nproc or a size"
            )


def _divisors(run: "RunConfig", values: Mapping[str, Any]) -> Iterator[str]:
    """Compare pairs of keys of which the first must divide the second, where both are given."""
    pairs = [
        (_TP, "num_attention_heads"),
        (_EP, "num_experts"),
        ("moe_router_num_groups", "num_experts"),
        ("moe_router_group_topk", "moe_router_topk"),
    ]
    if run.model.group_query_attention:
        pairs += [("num_query_groups", "num_attention_heads"), (_TP, "num_query_groups")]
    if run.model.kv_channels is None and not run.model.multi_latent_attention:
        pairs.append(("num_attention_heads", "hidden_size"))
    if run.parallelism.sequence_parallel:
        pairs.append((_TP, "seq_length"))
    for part, whole in pairs:
        divisor, number = values.get(part), values.get(whole)
        if isinstance(divisor, int) and isinstance(number, int) and divisor and number % divisor:
            yield f"{{{part}}} does not divide {{{whole}}}; change one of the two"
    multiple = run.training.micro_batch_size * run.parallelism.data_parallel_size
    if run.global_batch_size % multiple:
        yield (
            "{global_batch_size} is not a multiple of {micro_batch_size} × data parallel size "
            f"{run.parallelism.data_parallel_size}; every rank processes whole micro-batches, so change one"
        )


def _model(model: ModelArguments, values: Mapping[str, Any]) -> Iterator[str]:
    layers = model.moe_layer_freq
    if isinstance(layers, int) and layers < 1:
        yield f"model.moe_layer_freq: got {layers}, wanted 1 or more"
    if isinstance(layers, tuple) and len(layers) != model.num_layers:
        yield f"model.moe_layer_freq lists {len(layers)} layers, wanted {{num_layers}}; give 0 or 1 for each"
    if model.num_experts is not None and model.moe_router_topk > model.num_experts:
        yield "{moe_router_topk} is larger than {num_experts}; lower moe_router_topk"
    if (values.get("moe_router_num_groups") is None) != (values.get("moe_router_group_topk") is None):
        yield "model: got only one of moe_router_num_groups and moe_router_group_topk; set both or neither"
    if model.moe_shared_expert_intermediate_size is not None and model.add_bias_linear:
        yield "{add_bias_linear}: Megatron has no biases in shared experts; set it to false"
    if model.moe_router_load_balancing_type == "none" and model.moe_aux_loss_coeff:
        yield "{moe_aux_loss_coeff} has no effect with {moe_router_load_balancing_type}; change one of them"
    if model.num_query_groups > 1 and not model.group_query_attention:
        yield "{num_query_groups} has no effect without model.group_query_attention; set it to true"
    if model.multi_latent_attention and (
        model.kv_channels is not None or model.add_bias_linear or model.position_embedding_type != "rope"
    ):
        yield (
            "multi_latent_attention ignores {kv_channels}, {add_bias_linear} and {position_embedding_type}; "
            "remove kv_channels, set add_bias_linear to false and position_embedding_type to rope"
        )
    if model.family == "bert":
        for name, supported in _OF_BERT.items():
            if (value := values.get(name, supported[0])) not in supported:
                wanted = " or ".join(map(str, supported))
                yield f"{name}: got {value}, wanted {wanted}; Megatron's BERT has nothing else; change it"


def _training(run: "RunConfig", values: Mapping[str, Any]) -> Iterator[str]:
    training = run.training
    if training.lr_warmup_iters >= training.train_iters:
        yield "{lr_warmup_iters} must be smaller than {train_iters}; lower it"
    begin, end = training.profile_step_start, training.profile_step_end
    if training.profile and not begin < end <= training.train_iters:
        yield "{profile_step_end} is not between {profile_step_start} and {train_iters}; change one of them"


def _experts(run: "RunConfig") -> Iterator[str]:
    cut, name = run.parallelism, run.strategy.name
    if run.model.num_experts is None:
        if cut.expert_model_parallel_size > 1 or name != "none":
            what = f"{{{_EP}}}" if cut.expert_model_parallel_size > 1 else "{strategy}"
            yield f"{what} needs an MoE model, but this model is dense; set model.num_experts"
    elif cut.tensor_model_parallel_size > 1 and not cut.sequence_parallel and name == "none":
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
