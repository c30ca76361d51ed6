"""Settings of the model: the ``model`` section of a run's YAML."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Activation = Literal["gelu", "openai_gelu", "squared_relu", "swiglu", "quick_geglu"]


class ModelSettings(BaseModel):
    """A GPT or BERT whose feed-forward layers may be mixtures of experts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Literal["gpt", "bert"] = Field(
        default="gpt",
        description="gpt predicts the next token; bert masked words and the order of sentences.",
    )
    order_head: bool = Field(
        default=True, description="bert: the head that says whether two parts are in order. gpt: no effect."
    )
    num_layers: int = Field(ge=1, le=10_000, description="Transformer layers.")
    hidden_size: int = Field(ge=1, description="Width of the hidden states.")
    num_attention_heads: int = Field(ge=1, description="Attention heads; must divide hidden_size.")
    num_query_groups: int | None = Field(
        default=None, ge=1, description="Key/value heads of grouped-query attention. Default: no grouping."
    )
    kv_channels: int | None = Field(
        default=None, ge=1, description="Width of a head. Default: hidden_size / num_attention_heads."
    )
    qk_layernorm: bool = Field(default=False, description="Norms of queries and keys, in every head.")
    seq_length: int = Field(ge=2, description="Tokens in a sample.")
    ffn_hidden_size: int | None = Field(
        default=None, ge=1, description="Inner width of a dense feed-forward layer. Default: 4 × hidden_size."
    )
    activation: Activation = Field(default="gelu", description="Activation of the feed-forward layers.")
    normalization: Literal["LayerNorm", "RMSNorm"] = Field(default="LayerNorm", description="Kind of norm.")
    norm_epsilon: float = Field(default=1e-5, gt=0, description="Added to the variance in norms.")
    position_embedding: Literal["learned_absolute", "rope", "none"] = Field(
        default="rope", description="Position embedding."
    )
    rotary_base: int = Field(default=10000, ge=1, description="Base of rope's wave lengths.")
    linear_bias: bool = Field(default=False, description="Biases in the linear layers (experts included).")
    tie_embeddings: bool = Field(
        default=True, description="Use the input embedding as the output layer's weight."
    )
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on hidden states.")
    attention_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on attention weights.")
    init_std: float = Field(default=0.02, gt=0, description="Standard deviation of the initial weights.")

    num_experts: int | None = Field(
        default=None, ge=2, le=100_000, description="Experts in each MoE layer. Default: a dense model."
    )
    moe_top_k: int = Field(default=2, ge=1, description="Experts that a token goes to.")
    moe_layer_freq: int | tuple[Literal[0, 1], ...] = Field(
        default=1,
        description="n: every n-th layer is an MoE layer; or one 0 (dense) or 1 (MoE) for each layer.",
    )
    moe_ffn_hidden_size: int | None = Field(
        default=None, ge=1, description="Inner width of an expert. Default: ffn_hidden_size."
    )
    moe_shared_expert_size: int | None = Field(
        default=None, ge=1, description="Inner width of the shared experts together. Default: none."
    )
    moe_balancing: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"] = Field(
        default="none", description="How the router itself is pushed towards balance."
    )
    moe_aux_loss_coeff: float = Field(default=0.0, ge=0, description="Weight of the balancing loss.")
    moe_z_loss_coeff: float | None = Field(default=None, ge=0, description="Weight of the router's z-loss.")
    moe_pre_softmax: bool | None = Field(
        default=None, description="Softmax before top-k. Default: only for top-1, where Megatron needs it."
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = Field(
        default=None, description="Precision of the router. Default: that of the model."
    )

    @model_validator(mode="after")
    def _check_family(self) -> Self:
        if self.family == "bert":
            if self.rotary_base != 10000:
                raise ValueError(
                    f"model.rotary_base {self.rotary_base}: Megatron's BERT knows only 10000; leave it out"
                )
            if self.position_embedding == "none":
                raise ValueError(
                    "model.position_embedding none: Megatron's BERT has learned_absolute or rope; set one of "
                    "these"
                )
            if self.qk_layernorm:
                raise ValueError(
                    "model.qk_layernorm: Megatron's BERT has no norms of queries and keys; set it to false"
                )
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"model.num_attention_heads {self.num_attention_heads} does not divide "
                f"model.hidden_size {self.hidden_size}; every head needs the same width, or set kv_channels"
            )
        if self.num_query_groups is not None and self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"model.num_query_groups {self.num_query_groups} does not divide "
                f"model.num_attention_heads {self.num_attention_heads}"
            )
        if self.num_experts is not None and self.moe_top_k > self.num_experts:
            raise ValueError(
                f"model.moe_top_k {self.moe_top_k} is larger than model.num_experts {self.num_experts}; "
                "a token cannot go to more experts than there are"
            )
        if self.moe_shared_expert_size is not None and self.linear_bias:
            raise ValueError(
                f"model.moe_shared_expert_size {self.moe_shared_expert_size} and model.linear_bias exclude "
                "each other: Megatron has no biases in shared experts; set linear_bias to false"
            )
        if self.moe_balancing == "none" and self.moe_aux_loss_coeff > 0:
            raise ValueError(
                f"model.moe_aux_loss_coeff {self.moe_aux_loss_coeff} has no effect while model.moe_balancing "
                "is none; set moe_balancing to aux_loss or the coefficient to 0"
            )
        if isinstance(self.moe_layer_freq, tuple) and len(self.moe_layer_freq) != self.num_layers:
            raise ValueError(
                f"model.moe_layer_freq lists {len(self.moe_layer_freq)} layers, wanted "
                f"model.num_layers {self.num_layers}"
            )
        if isinstance(self.moe_layer_freq, int) and self.moe_layer_freq < 1:
            raise ValueError(f"model.moe_layer_freq: got {self.moe_layer_freq}, wanted 1 or more")
        return self

    @property
    def head_width(self) -> int:
        """Elements of a query of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def dense_ffn_size(self) -> int:
        """Inner width of a dense feed-forward layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Inner width of an expert."""
        return self.moe_ffn_hidden_size or self.dense_ffn_size

    @property
    def is_gated(self) -> bool:
        """Whether a feed-forward layer has two input matrices, of whose products one gates the other."""
        return self.activation in ("swiglu", "quick_geglu")

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """For every layer, whether it has experts."""
        if self.num_experts is None:
            return (False,) * self.num_layers
        if isinstance(self.moe_layer_freq, int):
            return tuple(layer % self.moe_layer_freq == 0 for layer in range(self.num_layers))
        return tuple(bool(is_moe) for is_moe in self.moe_layer_freq)
