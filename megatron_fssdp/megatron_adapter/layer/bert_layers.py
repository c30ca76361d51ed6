"""Adds experts to Megatron's BERT, whose layer specs have no experts and which ignores ``--num-experts``.

``BertModel`` takes one spec for all layers, so a layer decides by its number whether it has experts.
"""

import dataclasses
import logging
from functools import partial
from typing import Any

from megatron.core.extensions.transformer_engine import TENorm
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

from megatron_fssdp.megatron_adapter.wrapping import wrap

logger = logging.getLogger(__name__)

# The prefix, in checkpoints, of a dense layer's norm that is a part of the first linear layer.
_FUSED_NORM = "pre_mlp_layernorm."


class BertLayer(TransformerLayer):
    """Megatron's transformer layer, with the submodules ``experts`` where ``moe_layer_freq`` selects it."""

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
    """Return a spec of BERT's layers with Megatron's MoE layer in the layers that have experts.

    Experts are built as in Megatron's GPT specs, and all else as in the given spec of a dense layer. This is
    returned unchanged if the model has no experts, or if its feed-forward layer is not Megatron's.
    """
    dense = spec.submodules
    is_dense = isinstance(dense.mlp, partial) and dense.mlp.func == MLP.as_mlp_submodule
    if config.num_moe_experts is None or spec.module is not TransformerLayer or not is_dense:
        return spec
    is_local = dense.self_attention.submodules.core_attention is DotProductAttention
    # Transformer Engine's first linear layer contains the norm. Experts do not, so they need a norm module.
    norm = TENorm if dense.pre_mlp_layernorm is IdentityOp else dense.pre_mlp_layernorm
    experts = dataclasses.replace(
        dense,
        pre_mlp_layernorm=norm,
        mlp=moe_module_specs.get_moe_module_spec(
            use_te=not is_local, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
        ),
        sharded_state_dict_keys_map={
            key: prefix for key, prefix in dense.sharded_state_dict_keys_map.items() if key != _FUSED_NORM
        },
    )
    return ModuleSpec(module=BertLayer, params={**spec.params, "experts": experts}, submodules=dense)


def install() -> None:
    """Make every ``BertModel`` obey ``--num-experts``."""

    # Scripts import Megatron's specs by name, maybe before the plugin is registered, so the model is wrapped.
    def build_with_experts(
        build: Any,
        self: Any,
        config: Any,
        num_tokentypes: int,
        transformer_layer_spec: Any,  # Megatron may pass it by its name.
        *args: Any,
        **more: Any,
    ) -> None:
        spec = with_experts(transformer_layer_spec, config)
        if spec is not transformer_layer_spec:
            num_layers = sum(_has_experts(config, layer) for layer in range(config.num_layers))
            log_single_rank(
                logger,
                logging.WARNING,  # This level is shown under every --logging-level.
                f"[fssdp] BERT: Megatron's layer spec has no experts; added {config.num_moe_experts} experts "
                f"to each of {num_layers} layers, as --num-experts and --moe-layer-freq request",
            )
        build(self, config, num_tokentypes, spec, *args, **more)

    wrap(BertModel, "__init__", build_with_experts)


def _has_experts(config: Any, layer: int) -> bool:
    # Megatron's rule for GPT; layers count from 0 over all pipeline stages.
    frequency = config.moe_layer_freq
    return layer % frequency == 0 if isinstance(frequency, int) else bool(frequency[layer])
