"""Counts the parameters of a model from its settings: all of them, and those that one token uses.

The counts are those of the model that Megatron builds, without its padding of the vocabulary. Shape letters:
M model dimension, F ffn dimension, E experts.
"""

from collections import Counter
from dataclasses import dataclass, fields

from megatron_fssdp.config.run.model_settings import ModelSettings


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

    embeddings: int = 0
    attention: int = 0
    dense_mlps: int = 0
    routers: int = 0
    shared_experts: int = 0
    selected_experts: int = 0
    other_experts: int = 0
    selected_expert_biases: int = 0
    other_expert_biases: int = 0
    norms_and_biases: int = 0
    output_layer: int = 0
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
        biases = self.selected_expert_biases + self.other_expert_biases
        return self.selected_experts + self.other_experts + biases

    @property
    def matrices_of_layers(self) -> int:
        """Number of elements of the layers' matrices, the count that Hecate and FasterMoE state.

        It excludes embeddings, norms, biases and everything after the layers.
        """
        experts = self.selected_experts + self.other_experts + self.shared_experts
        return self.attention + self.dense_mlps + self.routers + experts


def count_parameters(model: ModelSettings, vocab_size: int) -> ParameterCount:
    """Count a model's parameters.

    Args:
        model: Architecture of the model.
        vocab_size: Number of token ids. Megatron pads this number, and the padding is not counted.
    """
    hidden, is_bert = model.hidden_size, model.family == "bert"
    norm = _norm_vectors(model) * hidden
    positions = model.seq_length if model.position_embedding == "learned_absolute" else 0
    parts_of_text = 2 if is_bert and model.order_head else 0
    loss_heads, square = 0, hidden * hidden + hidden
    if is_bert:
        # A dense layer, a norm and the output layer's biases; then the sentence-order head.
        loss_heads = square + norm + vocab_size
        loss_heads += square + 2 * hidden + 2 if model.order_head else 0
    # A projection of two hidden states to one, three norms, and a transformer layer like the last one.
    later_tokens = 2 * hidden * hidden + 3 * norm + _layer_elements(model, model.moe_layers[-1]).total()
    layers = Counter(norms_and_biases=norm)  # the final norm
    for is_moe in model.moe_layers:
        layers += _layer_elements(model, is_moe)
    return ParameterCount(
        embeddings=(vocab_size + positions + parts_of_text) * hidden,
        output_layer=0 if model.tie_embeddings else vocab_size * hidden,
        loss_heads=loss_heads,
        multi_token_prediction=(model.mtp_num_layers or 0) * later_tokens,
        **layers,
    )


def expert_elements(model: ModelSettings) -> int:
    """Return the number of elements of one routed expert, biases included."""
    ffn = model.expert_ffn_size
    return mlp_matrix_elements(model, ffn) + (_mlp_bias_elements(model, ffn) if model.linear_bias else 0)


def mlp_matrix_elements(model: ModelSettings, ffn: int) -> int:
    """Return the number of elements of a feed-forward layer's two or three matrices of M × F elements."""
    return (3 if model.is_gated else 2) * model.hidden_size * ffn


def attention_elements(model: ModelSettings) -> int:
    """Return the number of elements of a layer's projections of queries, keys, values and results."""
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


def _layer_elements(model: ModelSettings, is_moe: bool) -> Counter[str]:
    """Count the parameters of one transformer layer, by the names in :class:`ParameterCount`."""
    hidden, bias = model.hidden_size, int(model.linear_bias)
    queries, keys = model.num_attention_heads * model.head_width, _key_size(model)
    latent = (model.q_lora_rank or 0) + model.kv_lora_rank if model.multi_latent_attention else 0
    # Two norms, and the norms of queries and keys or of the latent vectors.
    inner = (latent or 2 * model.head_width) if model.qk_layernorm else 0
    norms = _norm_vectors(model) * (2 * hidden + inner)
    sinks = model.num_attention_heads if model.attention_sinks else 0
    biases = sinks + bias * (queries + 2 * keys + hidden)
    found = Counter(attention=attention_elements(model), norms_and_biases=norms + biases)
    if not is_moe:
        dense_mlp = mlp_matrix_elements(model, model.dense_ffn_size)
        mlp_biases = bias * _mlp_bias_elements(model, model.dense_ffn_size)
        return found + Counter(dense_mlps=dense_mlp, norms_and_biases=mlp_biases)
    experts, matrices = model.num_experts or 0, mlp_matrix_elements(model, model.expert_ffn_size)
    selected, expert_biases = min(model.moe_top_k, experts), expert_elements(model) - matrices
    return found + Counter(
        routers=hidden * experts,
        shared_experts=mlp_matrix_elements(model, model.moe_shared_expert_size or 0),
        selected_experts=selected * matrices,
        other_experts=(experts - selected) * matrices,
        selected_expert_biases=selected * expert_biases,
        other_expert_biases=(experts - selected) * expert_biases,
        norms_and_biases=bias * experts,  # gates have biases, the output layer does not
    )


def _key_size(model: ModelSettings) -> int:
    return (model.num_query_groups or model.num_attention_heads) * model.head_width


def _norm_vectors(model: ModelSettings) -> int:
    return 2 if model.normalization == "LayerNorm" else 1


def _mlp_bias_elements(model: ModelSettings, ffn: int) -> int:
    return (2 if model.is_gated else 1) * ffn + model.hidden_size
