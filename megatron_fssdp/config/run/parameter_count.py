"""Counts the parameters of the model that Megatron builds, without its padding of the vocabulary."""

from dataclasses import dataclass

from megatron_fssdp.config.run.sections import ModelArguments


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of elements of a model's parameters."""

    layer_matrices: int  # of attention, gates, shared experts and feed-forward layers without experts
    expert_matrices: int  # of all routed experts
    small: int  # norms, biases, and learned numbers in softmaxes
    outside_layers: int  # embeddings, output layer, and BERT's layers between its last layer and its losses
    multi_token_prediction: int  # layers that predict later tokens, with all their experts
    idle: int  # elements of the routed experts, above, that do not process one token

    @property
    def matrices_of_layers(self) -> int:
        """Elements of the layers' matrices, the count that Hecate and FasterMoE state."""
        return self.layer_matrices + self.expert_matrices

    @property
    def main_model(self) -> int:
        """Elements without the layers of multi-token prediction."""
        return self.matrices_of_layers + self.small + self.outside_layers

    @property
    def total(self) -> int:
        """All elements."""
        return self.main_model + self.multi_token_prediction

    @property
    def activated(self) -> int:
        """Elements that one token uses, without multi-token prediction, which only training needs."""
        return self.main_model - self.idle


def count_parameters(model: ModelArguments, vocab_size: int) -> ParameterCount:
    """Count a model's parameters."""
    hidden, norm, num_moe_layers = model.hidden_size, _norm_elements(model), sum(model.moe_layers)
    num_experts, elements = model.num_experts or 0, expert_elements(model)
    matrices = mlp_matrix_elements(model, model.expert_ffn_size)
    most_positions = getattr(model, "max_position_embeddings", None) or model.seq_length
    positions = most_positions if model.position_embedding_type == "learned_absolute" else 0
    num_vocabularies = 1 + model.untie_embeddings_and_output_weights
    outside = (num_vocabularies * vocab_size + positions) * hidden
    if model.family == "bert":
        # A dense layer, a norm and the output layer's biases.
        square = hidden * hidden + hidden
        outside += square + norm + vocab_size
        if model.bert_binary_head:  # Embeddings of a text's two parts, a dense layer and two outputs.
            outside += 2 * hidden + square + 2 * hidden + 2
    small = [_small_elements(model, is_moe) for is_moe in model.moe_layers]
    # A projection of two hidden states to one, three norms, and a transformer layer like the last one.
    later_tokens = 2 * hidden * hidden + 3 * norm + small[-1]
    later_tokens += dense_matrix_elements(model, model.moe_layers[-1])
    later_tokens += num_experts * elements if model.moe_layers[-1] else 0
    return ParameterCount(
        layer_matrices=sum(dense_matrix_elements(model, is_moe) for is_moe in model.moe_layers),
        expert_matrices=num_moe_layers * num_experts * matrices,
        small=sum(small) + norm + num_moe_layers * num_experts * (elements - matrices),
        outside_layers=outside,
        multi_token_prediction=(model.mtp_num_layers or 0) * later_tokens,
        idle=num_moe_layers * max(num_experts - model.moe_router_topk, 0) * elements,
    )


def dense_matrix_elements(model: ModelArguments, is_moe: bool) -> int:
    """Elements of a layer's matrices outside routed experts; MoE layers have a gate."""
    ffn = (model.moe_shared_expert_intermediate_size or 0) if is_moe else model.dense_ffn_size
    gate = model.hidden_size * (model.num_experts or 0) if is_moe else 0
    return _attention_elements(model) + mlp_matrix_elements(model, ffn) + gate


def expert_elements(model: ModelArguments) -> int:
    """Elements of one routed expert, biases included."""
    ffn = model.expert_ffn_size
    return mlp_matrix_elements(model, ffn) + (_mlp_bias_elements(model, ffn) if model.add_bias_linear else 0)


def mlp_matrix_elements(model: ModelArguments, ffn: int) -> int:
    """Elements of a feed-forward layer's two or three matrices, each of model × FFN dimension."""
    return (3 if model.is_gated else 2) * model.hidden_size * ffn


def _attention_elements(model: ModelArguments) -> int:
    """Elements of a layer's projections of queries, keys, values and results."""
    if model.multi_latent_attention:
        heads, hidden, positions = model.num_attention_heads, model.hidden_size, model.qk_pos_emb_head_dim
        queries = heads * (model.qk_head_dim + positions)
        rank = model.q_lora_rank
        to_queries = hidden * queries if rank is None else rank * (hidden + queries)
        to_latent = hidden * (model.kv_lora_rank + positions)
        from_latent = model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim)
        return to_queries + to_latent + from_latent + heads * model.v_head_dim * hidden
    queries = model.num_attention_heads * model.head_width
    return model.hidden_size * (2 * queries + 2 * _key_size(model))


def _small_elements(model: ModelArguments, is_moe: bool) -> int:
    """Elements of a layer's norms, biases and softmax, outside its routed experts."""
    inner = 0
    if model.qk_layernorm:  # of queries and keys, or of the latent vectors
        latent = (model.q_lora_rank or 0) + model.kv_lora_rank
        inner = latent if model.multi_latent_attention else 2 * model.head_width
    sinks = model.num_attention_heads if model.softmax_type == "learnable" else 0
    small = 2 * _norm_elements(model) + _norm_elements(model, inner) + sinks
    if model.add_bias_linear:
        # Gates have biases, the output layer does not.
        small += model.num_attention_heads * model.head_width + 2 * _key_size(model) + model.hidden_size
        small += (model.num_experts or 0) if is_moe else _mlp_bias_elements(model, model.dense_ffn_size)
    return small


def _key_size(model: ModelArguments) -> int:
    heads = model.num_query_groups if model.group_query_attention else model.num_attention_heads
    return heads * model.head_width


def _norm_elements(model: ModelArguments, size: int | None = None) -> int:
    vectors = 2 if model.normalization == "LayerNorm" else 1
    return vectors * (model.hidden_size if size is None else size)


def _mlp_bias_elements(model: ModelArguments, ffn: int) -> int:
    return (2 if model.is_gated else 1) * ffn + model.hidden_size
