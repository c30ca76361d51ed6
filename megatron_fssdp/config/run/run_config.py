"""All settings of one training run, and what they must have in common.

Megatron refuses many contradictions by itself, before any rank starts. The rules here are for what it ignores
silently, what only fails when the ranks build the model, and what the simulator computes with. In their
texts, a key in braces becomes the key with its section and value.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Self

from pydantic import ConfigDict, Field, model_validator

from megatron_fssdp.config.loading import Problems, Settings, setting
from megatron_fssdp.config.run import megatron_options, sections
from megatron_fssdp.config.strategy.strategy_registry import strategy_settings

SECTIONS: Mapping[str, type[sections.Section]] = {
    "model": sections.ModelArguments,
    "parallelism": sections.ParallelismArguments,
    "training": sections.TrainingArguments,
}
"""Sections with arguments of Megatron, and the models of their keys."""

HOMES = {key: section for section, model in SECTIONS.items() for key in model.model_fields}
"""The section of each key that is declared."""

_OWN_KEYS = {
    key for section in SECTIONS.values() for key, field in section.model_fields.items() if field.description
}

_TP, _PP, _EP = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))

_NAMED_DATA = "data_path split mock_data vocab_size tokenizer_type tokenizer_model null_tokenizer_eod_id"

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


class StrategySection(Settings):
    """The MoE load-balancing strategy of a run."""

    name: str = setting("none", "Name of the strategy.")
    settings: dict[str, Any] = setting({}, "The strategy's own keys, as for --moe-strategy-set.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        strategy_settings(self.name, self.settings, "strategy.settings")
        return self


class RunConfig(Settings):
    """Settings of a training run."""

    model_config = ConfigDict(title="megatron-fssdp training run")

    model: sections.ModelArguments = Field(description="Architecture of the model.")
    data: sections.DataSettings = Field(
        default_factory=sections.DataSettings, description="Training data and tokenizer."
    )
    parallelism: sections.ParallelismArguments = Field(
        default_factory=sections.ParallelismArguments, description="Number of ranks and parallel sizes."
    )
    training: sections.TrainingArguments = Field(description="Batch sizes, optimizer, precision and outputs.")
    strategy: StrategySection = Field(
        default_factory=StrategySection, description="MoE load-balancing strategy."
    )

    @classmethod
    def key_problems(cls, settings: Mapping[str, Any]) -> Problems:
        """Return which sections are missing, and what is wrong with keys that no section declares.

        Megatron's parser judges the values of these keys.
        """
        homes, problems = dict(HOMES), Problems()
        for section, folder in (("model", "models/"), ("training", "training/")):
            if section not in settings:
                advice = f"add it, or name a part in {folder} as well (megatron-fssdp configs lists them)"
                problems[section,] = f"missing section; {advice}"
        for section, model in SECTIONS.items():
            values = settings.get(section)
            for key, value in values.items() if isinstance(values, Mapping) else ():
                if key in model.model_fields:
                    continue
                if (home := homes.setdefault(key, section)) != section:
                    text = f"unknown key '{key}'; it is under {home}"
                elif key in megatron_options.options():
                    text = megatron_options.problem(key, value)
                else:
                    own = [name for name in model.model_fields if name in _OWN_KEYS]
                    text = megatron_options.unknown_option(key, list(model.model_fields), own)
                if text:
                    problems[section, key] = text
        return problems

    def megatron_values(self) -> dict[str, Any]:
        """Return the arguments of Megatron that this run gives, by name. None: without a value."""
        return {
            name: value
            for section in (self.model, self.parallelism, self.training)
            for name, value in section
            if name in section.model_fields_set
            and name not in _OWN_KEYS
            and (value is not None or name not in type(section).model_fields)
        }

    @property
    def vocab_size(self) -> int:
        """Number of token ids, without padding."""
        return int(self.megatron_values().get("vocab_size") or self.data.vocab_size)

    @property
    def global_batch_size(self) -> int:
        """Number of samples of an iteration: by default one micro-batch on every data-parallel rank."""
        default = self.training.micro_batch_size * self.parallelism.data_parallel_size
        return self.training.global_batch_size or default

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [(part, *item) for part in SECTIONS for item in getattr(self, part)]
        values = {name: value for _, name, value in given}
        texts = chain(_sizes(self, values), _model(self.model, values), _training(self))
        if text := next(texts, ""):
            shown = {
                name: f"{part}.{name} {value if isinstance(value, str) else json.dumps(value, default=str)}"
                for part, name, value in given
            }
            raise ValueError(text.format_map({**shown, "strategy": f"strategy '{self.strategy.name}'"}))
        return self


def _sizes(run: RunConfig, values: Mapping[str, Any]) -> Iterator[str]:
    model, cut = run.model, run.parallelism
    in_experts = _TP if cut.expert_tensor_parallel_size is None else "expert_tensor_parallel_size"
    experts = cut.expert_model_parallel_size * cut.expert_tensor_size * cut.pipeline_model_parallel_size
    for product, factors in (
        (cut.ranks_of_a_model, f"{{{_TP}}} × {{{_PP}}} × {{context_parallel_size}}"),
        (experts, f"{{{_EP}}} × {{{in_experts}}} × {{{_PP}}}"),
    ):
        if cut.world_size % product:
            yield (
                f"{factors} = {product} does not divide the {cut.world_size} ranks "
                "({nproc_per_node} × {num_nodes}); change one of them"
            )
    # The first must divide the second, where both are given.
    pairs = [
        (_TP, "num_attention_heads"),
        (_EP, "num_experts"),
        ("moe_router_num_groups", "num_experts"),
        ("moe_router_group_topk", "moe_router_topk"),
    ]
    if model.group_query_attention:
        pairs += [("num_query_groups", "num_attention_heads"), (_TP, "num_query_groups")]
    if model.kv_channels is None and not model.multi_latent_attention:
        pairs.append(("num_attention_heads", "hidden_size"))
    if cut.sequence_parallel:
        pairs.append((_TP, "seq_length"))
    for part, whole in pairs:
        divisor, number = values.get(part), values.get(whole)
        if isinstance(divisor, int) and isinstance(number, int) and divisor and number % divisor:
            yield f"{{{part}}} does not divide {{{whole}}}; change one of the two"
    multiple = run.training.micro_batch_size * cut.data_parallel_size
    if run.global_batch_size % multiple:
        yield (
            "{global_batch_size} is not a multiple of {micro_batch_size} × data parallel size "
            f"{cut.data_parallel_size}; every rank processes whole micro-batches, so change one"
        )


def _model(model: sections.ModelArguments, values: Mapping[str, Any]) -> Iterator[str]:
    layers = model.moe_layer_freq
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


def _training(run: RunConfig) -> Iterator[str]:
    training, cut, name = run.training, run.parallelism, run.strategy.name
    if training.lr_warmup_iters >= training.train_iters:
        yield "{lr_warmup_iters} must be smaller than {train_iters}; lower it"
    begin, end = training.profile_step_start, training.profile_step_end
    if training.profile and not begin < end <= training.train_iters:
        yield "{profile_step_end} is not between {profile_step_start} and {train_iters}; change one of them"
    if run.model.num_experts is None:
        if cut.expert_model_parallel_size > 1 or name != "none":
            cause = f"{{{_EP}}}" if cut.expert_model_parallel_size > 1 else "{strategy}"
            yield f"{cause} needs an MoE model, but this model is dense; set model.num_experts"
    elif cut.tensor_model_parallel_size > 1 and not cut.sequence_parallel and name == "none":
        yield (
            f"{{{_TP}}} in an MoE model needs parallelism.sequence_parallel: true under {{strategy}}, "
            "because Megatron itself needs it; set it, or choose another strategy"
        )
    tokenizer, family = run.data.tokenizer, run.model.family
    for key in () if run.data.external else run.megatron_values().keys() & _NAMED_DATA.split():
        yield f"{{{key}}} follows from the section data; change that, or set data.external to true"
    is_built = not run.data.external and run.data.path is None  # a folder's data is checked when it is read
    if is_built and (tokenizer == "wordpiece") != (family == "bert"):
        yield (
            f"data.tokenizer {tokenizer} does not fit model.family {family}: bert trains on sentences in "
            "wordpiece, gpt trains on whole texts in bpe or bytes; set data.tokenizer to "
            f"{'wordpiece' if family == 'bert' else 'bpe'}"
        )
