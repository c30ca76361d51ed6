"""Counts the parameters of a model from its settings: all of them, and those that one token uses.

The counts are those of the model that Megatron builds, without its padding of the vocabulary. Shape letters:
M model dimension, F ffn dimension, E experts.
"""

from dataclasses import dataclass, fields

from megatron_fssdp.config.run.sections import ModelArguments


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of elements of a model's parameters. Every element is in exactly one field.

    Attributes:
        embeddings: Embeddings of tokens, of learned positions, and of BERT's two parts of a text.
        attention: Matrices of queries, keys, values and results.
        dense_mlps: Matrices of feed-forward layers without experts.
        routers: Matrices of the gates.
        shared_experts: Matrices of shared experts, which process all tokens.
        selected_experts: Matrices of the routed experts that process one token.
        other_experts: Matrices of all other routed experts.
        selected_expert_biases: Biases of the routed experts that process one token.
        other_expert_biases: Biases of all other routed experts.
        norms_and_biases: Norms, biases outside the routed experts, and learned numbers in softmaxes.
        output_layer: Matrix of the output layer. 0 if it is shared with the embeddings.
        loss_heads: Layers of BERT between its last layer and its losses, and the output layer's biases.
        multi_token_prediction: Layers that predict later tokens, with all their experts.
    """

    embeddings: int
    attention: int
    dense_mlps: int
    routers: int
    shared_experts: int
    selected_experts: int
    other_experts: int
    selected_expert_biases: int
    other_expert_biases: int
    norms_and_biases: int
    output_layer: int
    loss_heads: int = 0
    multi_token_prediction: int = 0

    @property
    def total(self) -> int:
        """Number of all elements."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def activated(self) -> int:
        """Number of elements that one token uses, embeddings and output layer included.

        Layers of multi-token prediction are left out, because only training needs them.
        """
        return self.main_model - self.other_experts - self.other_expert_biases

    @property
    def main_model(self) -> int:
        """Number of all elements without the layers of multi-token prediction."""
        return self.total - self.multi_token_prediction

    @property
    def routed_experts(self) -> int:
        """Number of elements of the matrices and biases of all routed experts.

        Experts of multi-token prediction are left out.
        """
        return (
            self.selected_experts
            + self.other_experts
            + self.selected_expert_biases
            + self.other_expert_biases
        )

    @property
    def matrices_of_layers(self) -> int:
        """Number of elements of the layers' matrices, the count that Hecate and FasterMoE state.

        It excludes embeddings, norms, biases and everything after the layers.
        """
        experts = self.selected_experts + self.other_experts + self.shared_experts
        return self.attention + self.dense_mlps + self.routers + experts


def count_parameters(model: ModelArguments, vocab_size: int) -> ParameterCount:
    """Count a model's parameters.

    Args:
        model: Architecture of the model.
        vocab_size: Number of token ids. Megatron pads this number, and the padding is not counted.
    """
    hidden, num_moe_layers = model.hidden_size, sum(model.moe_layers)
    num_dense_layers = model.num_layers - num_moe_layers
    num_experts = model.num_experts or 0
    positions = model.seq_length if model.position_embedding_type == "learned_absolute" else 0
    parts_of_text = 2 if model.family == "bert" and model.bert_binary_head else 0
    matrices = mlp_matrix_elements(model, model.expert_ffn_size)
    biases = expert_elements(model) - matrices
    selected = num_moe_layers * min(model.moe_router_topk, num_experts)
    others = num_moe_layers * num_experts - selected
    return ParameterCount(
        embeddings=(vocab_size + positions + parts_of_text) * hidden,
        attention=model.num_layers * attention_elements(model),
        dense_mlps=num_dense_layers * mlp_matrix_elements(model, model.dense_ffn_size),
        routers=num_moe_layers * hidden * num_experts,
        shared_experts=num_moe_layers
        * mlp_matrix_elements(model, model.moe_shared_expert_intermediate_size or 0),
        selected_experts=selected * matrices,
        other_experts=others * matrices,
        selected_expert_biases=selected * biases,
        other_expert_biases=others * biases,
        norms_and_biases=_norm_elements(model) + _bias_elements(model),
        output_layer=vocab_size * hidden if model.untie_embeddings_and_output_weights else 0,
        loss_heads=_loss_head_elements(model, vocab_size),
        multi_token_prediction=(model.mtp_num_layers or 0) * _mtp_layer_elements(model),
    )


def expert_elements(model: ModelArguments) -> int:
    """Return the number of elements of one routed expert, biases included."""
    ffn = model.expert_ffn_size
    return mlp_matrix_elements(model, ffn) + (_mlp_bias_elements(model, ffn) if model.add_bias_linear else 0)


def mlp_matrix_elements(model: ModelArguments, ffn: int) -> int:
    """Return the number of elements of a feed-forward layer's two or three matrices of M × F elements."""
    return (3 if model.is_gated else 2) * model.hidden_size * ffn


def attention_elements(model: ModelArguments) -> int:
    """Return the number of elements of a layer's projections of queries, keys, values and results."""
    if model.multi_latent_attention:
        heads, hidden, positions = model.num_attention_heads, model.hidden_size, model.qk_pos_emb_head_dim
        queries = heads * (model.qk_head_dim + positions)
        rank = model.q_lora_rank
        to_queries = hidden * queries if rank is None else rank * (hidden + queries)
        to_latent = hidden * (model.kv_lora_rank + positions)
        from_latent = model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim)
        return to_queries + to_latent + from_latent + heads * model.v_head_dim * hidden
    return model.hidden_size * (2 * _query_size(model) + 2 * _key_size(model))


def _query_size(model: ModelArguments) -> int:
    return model.num_attention_heads * model.head_width


def _key_size(model: ModelArguments) -> int:
    return model.num_key_heads * model.head_width


def _norm_elements(model: ModelArguments) -> int:
    """Count the norms of all layers and the final norm."""
    return model.num_layers * _layer_norm_elements(model) + _norm_vectors(model) * model.hidden_size


def _norm_vectors(model: ModelArguments) -> int:
    return 2 if model.normalization == "LayerNorm" else 1


def _layer_norm_elements(model: ModelArguments) -> int:
    """Count a layer's two norms, and its norms of queries and keys or of the latent vectors."""
    inner = 0
    if model.qk_layernorm:
        latent = (model.q_lora_rank or 0) + model.kv_lora_rank
        inner = latent if model.multi_latent_attention else 2 * model.head_width
    return _norm_vectors(model) * (2 * model.hidden_size + inner)


def _mtp_layer_elements(model: ModelArguments) -> int:
    """Count a layer of multi-token prediction.

    It has a projection of two hidden states to one, three norms, and a transformer layer like the last one.
    """
    hidden, is_moe = model.hidden_size, model.moe_layers[-1]
    around = 2 * hidden * hidden + 3 * _norm_vectors(model) * hidden
    attention = attention_elements(model) + _layer_norm_elements(model) + _attention_extra_elements(model)
    if not is_moe:
        mlp = mlp_matrix_elements(model, model.dense_ffn_size)
        biases = _mlp_bias_elements(model, model.dense_ffn_size) if model.add_bias_linear else 0
        return around + attention + mlp + biases
    experts = model.num_experts or 0
    gate = experts * (hidden + int(model.add_bias_linear))
    shared = mlp_matrix_elements(model, model.moe_shared_expert_intermediate_size or 0)
    return around + attention + gate + shared + experts * expert_elements(model)


def _attention_extra_elements(model: ModelArguments) -> int:
    """Count the biases of a layer's attention and its learned numbers in the softmax."""
    sinks = model.num_attention_heads if model.softmax_type == "learnable" else 0
    biases = _query_size(model) + 2 * _key_size(model) + model.hidden_size if model.add_bias_linear else 0
    return sinks + biases


def _loss_head_elements(model: ModelArguments, vocab_size: int) -> int:
    """Count BERT's heads: a dense layer and a norm before the output layer, and the sentence-order head."""
    if model.family != "bert":
        return 0
    hidden = model.hidden_size
    square = hidden * hidden + hidden
    words = square + (2 if model.normalization == "LayerNorm" else 1) * hidden + vocab_size
    return words + (square + 2 * hidden + 2 if model.bert_binary_head else 0)


def _bias_elements(model: ModelArguments) -> int:
    """Count the biases outside the routed experts. Gates have biases, the output layer does not."""
    elements = model.num_layers * _attention_extra_elements(model)
    if not model.add_bias_linear:
        return elements
    for is_moe in model.moe_layers:
        elements += (model.num_experts or 0) if is_moe else _mlp_bias_elements(model, model.dense_ffn_size)
    return elements


def _mlp_bias_elements(model: ModelArguments, ffn: int) -> int:
    return (2 if model.is_gated else 1) * ffn + model.hidden_size
