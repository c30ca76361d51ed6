"""Parameters of a model, by its settings: of all of it, and of what one token passes through.

What Megatron builds, without its padding of the vocabulary. M model dim, F ffn dim, E experts.
"""

from dataclasses import dataclass, fields

from megatron_fssdp.config.model_settings import ModelSettings


@dataclass(frozen=True)
class ParameterCount:
    """Elements of a model's parameters, each in one place.

    Attributes:
        embeddings: Of tokens, of positions where these are learned, and of BERT's two parts of a text.
        attention: Matrices of queries, keys, values and results.
        dense_mlps: Matrices of feed-forward layers without experts.
        routers: Matrices of the gates.
        shared_experts: Matrices of experts that all tokens go to.
        chosen_experts: Matrices of those routed experts that one token goes to.
        other_experts: And of the others.
        chosen_expert_biases: Biases of those that one token goes to.
        other_expert_biases: And of the others.
        norms_and_biases: Vectors outside the routed experts.
        output_layer: Its matrix, unless that is the embeddings'.
        loss_heads: What BERT has between its last layer and its losses, and the output layer's biases.
    """

    embeddings: int
    attention: int
    dense_mlps: int
    routers: int
    shared_experts: int
    chosen_experts: int
    other_experts: int
    chosen_expert_biases: int
    other_expert_biases: int
    norms_and_biases: int
    output_layer: int
    loss_heads: int = 0

    @property
    def total(self) -> int:
        """All."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def activated(self) -> int:
        """What one token passes through, embeddings and output layer included."""
        return self.total - self.other_experts - self.other_expert_biases

    @property
    def routed_experts(self) -> int:
        """Matrices and biases of all routed experts."""
        return self.chosen_experts + self.other_experts + self.chosen_expert_biases + self.other_expert_biases

    @property
    def matrices_of_layers(self) -> int:
        """Without embeddings, all behind the layers, norms and biases: what Hecate and FasterMoE state."""
        experts = self.chosen_experts + self.other_experts + self.shared_experts
        return self.attention + self.dense_mlps + self.routers + experts


def count_parameters(model: ModelSettings, vocab_size: int) -> ParameterCount:
    """Count a model's parameters.

    Args:
        model: The model.
        vocab_size: Token ids there are. Megatron rounds them up to a multiple, which is not counted.
    """
    hidden, num_moe_layers = model.hidden_size, sum(model.moe_layers)
    num_dense_layers = model.num_layers - num_moe_layers
    num_experts = model.num_experts or 0
    positions = model.seq_length if model.position_embedding == "learned_absolute" else 0
    parts_of_text = 2 if model.family == "bert" and model.order_head else 0
    matrices = mlp_matrix_elements(model, model.expert_ffn_size)
    biases = expert_elements(model) - matrices
    chosen = num_moe_layers * min(model.moe_top_k, num_experts)
    others = num_moe_layers * num_experts - chosen
    return ParameterCount(
        embeddings=(vocab_size + positions + parts_of_text) * hidden,
        attention=model.num_layers * attention_elements(model),
        dense_mlps=num_dense_layers * mlp_matrix_elements(model, model.dense_ffn_size),
        routers=num_moe_layers * hidden * num_experts,
        shared_experts=num_moe_layers * mlp_matrix_elements(model, model.moe_shared_expert_size or 0),
        chosen_experts=chosen * matrices,
        other_experts=others * matrices,
        chosen_expert_biases=chosen * biases,
        other_expert_biases=others * biases,
        norms_and_biases=_norm_elements(model) + _bias_elements(model),
        output_layer=0 if model.tie_embeddings else vocab_size * hidden,
        loss_heads=_loss_head_elements(model, vocab_size),
    )


def expert_elements(model: ModelSettings) -> int:
    """Elements of one routed expert."""
    ffn = model.expert_ffn_size
    return mlp_matrix_elements(model, ffn) + (_mlp_bias_elements(model, ffn) if model.linear_bias else 0)


def mlp_matrix_elements(model: ModelSettings, ffn: int) -> int:
    """Elements of a feed-forward layer's matrices of M x F each."""
    return (3 if model.is_gated else 2) * model.hidden_size * ffn


def attention_elements(model: ModelSettings) -> int:
    """Elements of a layer's projections of queries, keys, values and results."""
    return model.hidden_size * (2 * _query_size(model) + 2 * _key_size(model))


def _query_size(model: ModelSettings) -> int:
    return model.num_attention_heads * model.head_width


def _key_size(model: ModelSettings) -> int:
    return (model.num_query_groups or model.num_attention_heads) * model.head_width


def _norm_elements(model: ModelSettings) -> int:
    """Two norms a layer, those of queries and keys, and the last one."""
    vectors = 2 if model.normalization == "LayerNorm" else 1
    of_heads = 2 * model.head_width if model.qk_layernorm else 0
    return vectors * (model.num_layers * (2 * model.hidden_size + of_heads) + model.hidden_size)


def _loss_head_elements(model: ModelSettings, vocab_size: int) -> int:
    """A dense layer with a norm before the output layer; another one on the first token, for the order."""
    if model.family != "bert":
        return 0
    hidden = model.hidden_size
    square = hidden * hidden + hidden
    words = square + (2 if model.normalization == "LayerNorm" else 1) * hidden + vocab_size
    return words + (square + 2 * hidden + 2 if model.order_head else 0)


def _bias_elements(model: ModelSettings) -> int:
    """Outside the routed experts; gates have one too, the output layer has none."""
    if not model.linear_bias:
        return 0
    elements = model.num_layers * (_query_size(model) + 2 * _key_size(model) + model.hidden_size)
    for is_moe in model.moe_layers:
        elements += (model.num_experts or 0) if is_moe else _mlp_bias_elements(model, model.dense_ffn_size)
    return elements


def _mlp_bias_elements(model: ModelSettings, ffn: int) -> int:
    return (2 if model.is_gated else 1) * ffn + model.hidden_size
