"""Experts in Megatron's BERT, whose layer specs have none and which ignores ``--num-experts``.

``BertModel`` takes one spec for all its layers, so a layer finds out by its number whether it has experts.
"""

import dataclasses
import logging
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.models.bert import bert_layer_specs
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import moe_module_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.utils import get_pg_rank, log_single_rank

from megatron_fssdp.config.errors import ConfigurationError

logger = logging.getLogger(__name__)

_FUSED_NORM = "pre_mlp_layernorm."
"""Prefix of the keys under which checkpoints keep a dense layer's norm inside its first matrix."""


class BertLayer(TransformerLayer):
    """Megatron's transformer layer, with experts where ``moe_layer_freq`` wants them.

    Args:
        config: Megatron's ``TransformerConfig``.
        submodules: Of a dense layer.
        layer_number: Counted from 1 in this model chunk.
        experts: Submodules of a layer with experts.
        pg_collection: Process groups; Megatron's global ones by default.
        vp_stage: Model chunk under interleaved pipelining.
        others: As for Megatron's layer.
    """

    def __init__(
        self,
        config: Any,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        *,
        experts: TransformerLayerSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        **others: Any,
    ) -> None:
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        offset = get_transformer_layer_offset(config, vp_stage, get_pg_rank(pg_collection.pp))
        super().__init__(
            config,
            experts if _has_experts(config, offset + layer_number - 1) else submodules,
            layer_number,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **others,
        )


def with_experts(spec: ModuleSpec, config: Any) -> ModuleSpec:
    """A spec of BERT's layers with Megatron's MoE layer where the config wants experts.

    Attention with its mask, norms and dropout stay those of the given spec; experts are built as in
    Megatron's GPT specs, from local or from Transformer Engine's modules as the given ones are.

    Args:
        spec: Of a dense layer, such as ``bert_layer_local_spec``.
        config: Megatron's ``TransformerConfig``.

    Returns:
        The spec; the given one if the model is dense, or if its feed-forward layer is something else than
        Megatron's.
    """
    dense = spec.submodules
    if config.num_moe_experts is None or spec.module is not TransformerLayer or not _is_dense(dense.mlp):
        return spec
    is_local = dense.self_attention.submodules.core_attention is DotProductAttention
    # Transformer Engine's first matrix has the norm in it, experts have not.
    norm = TENorm if dense.pre_mlp_layernorm is IdentityOp else dense.pre_mlp_layernorm
    experts = dataclasses.replace(
        dense,
        pre_mlp_layernorm=norm,
        mlp=moe_module_specs.get_moe_module_spec(
            use_te=not is_local,
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
        ),
        sharded_state_dict_keys_map={
            key: prefix for key, prefix in dense.sharded_state_dict_keys_map.items() if key != _FUSED_NORM
        },
    )
    return ModuleSpec(module=BertLayer, params={**spec.params, "experts": experts}, submodules=dense)


def stock_spec(use_transformer_engine: bool) -> ModuleSpec:
    """Megatron's own spec of a dense BERT layer.

    Raises:
        ConfigurationError: Transformer Engine is asked for and not installed.
    """
    if not use_transformer_engine:
        return bert_layer_specs.bert_layer_local_spec
    if not HAVE_TE:
        raise ConfigurationError(_WITHOUT_TE)
    return bert_layer_specs.get_bert_layer_with_transformer_engine_spec()


def install() -> None:
    """Make ``--num-experts`` count in every ``BertModel``, and the stock script importable.

    Done where the model takes its spec, because scripts bind Megatron's specs when they are imported, which
    may be before the plugin is registered. A model without experts is not touched.
    """
    build = BertModel.__init__

    @wraps(build)
    def with_experts_in_it(
        self: Any,
        config: Any,
        num_tokentypes: int,
        transformer_layer_spec: ModuleSpec,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        spec = with_experts(transformer_layer_spec, config)
        if spec is not transformer_layer_spec:
            log_single_rank(
                logger,
                logging.WARNING,  # shown whatever --logging-level says
                f"[fssdp] BERT: its layer spec has no experts; got {config.num_moe_experts} in each of "
                f"{sum(_has_experts(config, layer) for layer in range(config.num_layers))} layers, as "
                "--num-experts and --moe-layer-freq ask",
            )
        build(self, config, num_tokentypes, spec, *args, **kwargs)

    BertModel.__init__ = with_experts_in_it
    if not HAVE_TE:
        # Megatron-LM's script imports this spec whether it uses it or not (--spec local).
        bert_layer_specs.get_bert_layer_with_transformer_engine_spec = _MissingSpec


_WITHOUT_TE = (
    "BERT: got Megatron's Transformer Engine spec without Transformer Engine, wanted another: add "
    "--spec local (Megatron-LM's script) or --transformer-impl local (scripts/pretrain_bert.py), or install "
    "Transformer Engine"
)


class _MissingSpec:
    """Stands where a spec would be; says what is missing as soon as it is used."""

    def __getattr__(self, name: str) -> Any:
        raise ConfigurationError(_WITHOUT_TE)


def _has_experts(config: Any, layer: int) -> bool:
    """Whether a layer, counted from 0 over all pipeline stages, has experts; Megatron's rule for GPT."""
    frequency = config.moe_layer_freq
    return layer % frequency == 0 if isinstance(frequency, int) else bool(frequency[layer])


def _is_dense(mlp: Callable[..., Any]) -> bool:
    return isinstance(mlp, partial) and mlp.func == MLP.as_mlp_submodule
