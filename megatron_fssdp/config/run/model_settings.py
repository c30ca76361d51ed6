"""Settings of the model's architecture: the ``model`` section of a run's YAML."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Activation = Literal["gelu", "openai_gelu", "squared_relu", "swiglu", "quick_geglu"]


class ModelSettings(BaseModel):
    """Architecture of a GPT or BERT model, dense or with mixture-of-experts layers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Literal["gpt", "bert"] = Field(
        default="gpt",
        description="gpt predicts the next token. bert predicts masked words and the order of sentences.",
    )
    order_head: bool = Field(
        default=True,
        description="bert: whether a head predicts if two parts of a text are in order. gpt: no effect.",
    )
    num_layers: int = Field(ge=1, le=10_000, description="Number of transformer layers.")
    hidden_size: int = Field(ge=1, description="Width of the hidden states.")
    num_attention_heads: int = Field(
        ge=1, description="Number of attention heads. It must divide hidden_size unless kv_channels is set."
    )
    num_query_groups: int | None = Field(
        default=None,
        ge=1,
        description="Number of key/value heads of grouped-query attention. Default: no grouping.",
    )
    kv_channels: int | None = Field(
        default=None,
        ge=1,
        description="Width of one attention head. Default: hidden_size / num_attention_heads.",
    )
    qk_layernorm: bool = Field(
        default=False,
        description=(
            "Whether queries and keys are normalized in every head. With multi_latent_attention: whether "
            "the latent vectors are normalized."
        ),
    )
    multi_latent_attention: bool = Field(
        default=False,
        description=(
            "Whether attention projects keys and values through narrow latent vectors, as DeepSeek-V3 does. "
            "On GPUs this needs Transformer Engine."
        ),
    )
    q_lora_rank: int | None = Field(
        default=None,
        ge=1,
        description=(
            "multi_latent_attention: width of the latent vector of the queries. Default: queries have no "
            "latent vector."
        ),
    )
    kv_lora_rank: int = Field(
        default=512,
        ge=1,
        description="multi_latent_attention: width of the latent vector of keys and values.",
    )
    qk_head_dim: int = Field(
        default=128,
        ge=1,
        description="multi_latent_attention: width of the part of a head's query without positions.",
    )
    qk_pos_emb_head_dim: int = Field(
        default=64,
        ge=2,
        description="multi_latent_attention: width of the part of a head's query with positions.",
    )
    v_head_dim: int = Field(default=128, ge=1, description="multi_latent_attention: width of a head's value.")
    attention_sinks: bool = Field(
        default=False,
        description="Whether every head has a learned number in its softmax's denominator, as in GPT-OSS.",
    )
    window_size: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Number of tokens that a token attends to in layers with a sliding window, itself included. "
            "Default: no sliding windows."
        ),
    )
    full_attention_freq: int | None = Field(
        default=None,
        ge=2,
        description=(
            "With window_size: every n-th layer attends to all earlier tokens. Default: all layers have the "
            "sliding window."
        ),
    )
    seq_length: int = Field(ge=2, description="Number of tokens in a sample.")
    ffn_hidden_size: int | None = Field(
        default=None, ge=1, description="Inner width of a dense feed-forward layer. Default: 4 × hidden_size."
    )
    activation: Activation = Field(default="gelu", description="Activation of the feed-forward layers.")
    activation_clamp: float | None = Field(
        default=None,
        gt=0,
        description="Limit of the values that go into a gated activation. Default: no limit.",
    )
    glu_linear_offset: float = Field(
        default=0.0, description="Number added to the linear part of a gated activation."
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = Field(
        default="LayerNorm", description="Kind of normalization layers."
    )
    norm_epsilon: float = Field(
        default=1e-5, gt=0, description="Number added to the variance in normalization layers."
    )
    position_embedding: Literal["learned_absolute", "rope", "none"] = Field(
        default="rope", description="Kind of position embedding."
    )
    rotary_base: int = Field(
        default=10000, ge=1, description="Base of the wavelengths of the rope position embedding."
    )
    linear_bias: bool = Field(
        default=False, description="Whether linear layers have biases, experts included."
    )
    tie_embeddings: bool = Field(
        default=True, description="Whether the output layer uses the input embedding as its weight."
    )
    hidden_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout probability of hidden states."
    )
    attention_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout probability of attention weights."
    )
    init_std: float = Field(default=0.02, gt=0, description="Standard deviation of the initial weights.")

    num_experts: int | None = Field(
        default=None,
        ge=2,
        le=100_000,
        description="Number of experts in each MoE layer. Default: a dense model.",
    )
    moe_top_k: int = Field(default=2, ge=1, description="Number of experts that process each token.")
    moe_layer_freq: int | tuple[Literal[0, 1], ...] = Field(
        default=1,
        description=(
            "A number n: every n-th layer is an MoE layer, starting with the first. A list: one 0 (dense) or "
            "1 (MoE) for each layer."
        ),
    )
    moe_ffn_hidden_size: int | None = Field(
        default=None, ge=1, description="Inner width of an expert. Default: ffn_hidden_size."
    )
    moe_shared_expert_size: int | None = Field(
        default=None,
        ge=1,
        description="Total inner width of the shared experts. Default: no shared experts.",
    )
    moe_balancing: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"] = Field(
        default="none", description="Method by which the router itself balances the load of the experts."
    )
    moe_aux_loss_coeff: float = Field(default=0.0, ge=0, description="Weight of the balancing loss.")
    moe_z_loss_coeff: float | None = Field(
        default=None, ge=0, description="Weight of the router's z-loss. Default: no z-loss."
    )
    moe_pre_softmax: bool | None = Field(
        default=None,
        description=(
            "Whether the router applies softmax before top-k. Default: only if moe_top_k is 1, where "
            "Megatron needs it."
        ),
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = Field(
        default=None, description="Data type of the router's computation. Default: the model's data type."
    )
    moe_score_function: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="Function from the router's logits to the scores of the experts."
    )
    moe_expert_bias: bool = Field(
        default=False,
        description=(
            "Whether a bias for each expert, updated from the loads, is added to the scores that select the "
            "experts."
        ),
    )
    moe_expert_bias_rate: float = Field(
        default=1e-3, ge=0, description="moe_expert_bias: change of a bias in one iteration."
    )
    moe_num_groups: int | None = Field(
        default=None,
        ge=2,
        description=(
            "Number of equal groups of experts of which a token may use only moe_group_top_k. Default: no "
            "groups."
        ),
    )
    moe_group_top_k: int | None = Field(
        default=None,
        ge=1,
        description="With moe_num_groups: number of groups that contain the experts of a token.",
    )
    moe_scaling_factor: float | None = Field(
        default=None,
        gt=0,
        description="Factor by which the experts' results are multiplied. Default: no factor.",
    )

    mtp_num_layers: int | None = Field(
        default=None,
        ge=1,
        le=100,
        description=(
            "Number of additional layers that predict later tokens (multi-token prediction). They have the "
            "form of the last layer. Default: none."
        ),
    )
    mtp_loss_scaling_factor: float = Field(
        default=0.1, ge=0, description="mtp_num_layers: weight of the loss of the later tokens."
    )

    @model_validator(mode="after")
    def _check_family(self) -> Self:
        if self.family == "bert":
            if self.rotary_base != 10000:
                raise ValueError(
                    f"model.rotary_base {self.rotary_base}: Megatron's BERT supports only 10000; remove the "
                    "key"
                )
            if self.position_embedding == "none":
                raise ValueError(
                    "model.position_embedding none: Megatron's BERT supports only learned_absolute or rope; "
                    "set one of these"
                )
            if self.qk_layernorm:
                raise ValueError(
                    "model.qk_layernorm: Megatron's BERT does not normalize queries and keys; set it to false"
                )
            if self.multi_latent_attention or self.window_size is not None:
                raise ValueError(
                    "model.multi_latent_attention and model.window_size: Megatron's BERT does not have them; "
                    "remove the keys"
                )
            if self.mtp_num_layers is not None:
                raise ValueError(
                    "model.mtp_num_layers: Megatron's BERT does not predict later tokens; remove the key"
                )
        return self

    @model_validator(mode="after")
    def _check_attention(self) -> Self:
        if self.full_attention_freq is not None and self.window_size is None:
            raise ValueError(
                f"model.full_attention_freq {self.full_attention_freq} has no effect without "
                "model.window_size; set both or neither"
            )
        if not self.multi_latent_attention:
            return self
        if self.num_query_groups is not None or self.kv_channels is not None:
            raise ValueError(
                "model.multi_latent_attention and model.num_query_groups or model.kv_channels exclude each "
                "other: latent attention has widths of its own; remove these keys"
            )
        if self.position_embedding != "rope":
            raise ValueError(
                f"model.position_embedding {self.position_embedding}: multi_latent_attention supports only "
                "rope; set it to rope"
            )
        if self.linear_bias:
            raise ValueError(
                "model.linear_bias: multi_latent_attention has no biases; set linear_bias to false"
            )
        return self

    @model_validator(mode="after")
    def _check_router(self) -> Self:
        if self.moe_expert_bias and self.moe_score_function != "sigmoid":
            raise ValueError(
                f"model.moe_expert_bias with model.moe_score_function {self.moe_score_function}: Megatron "
                "has biases of experts only with sigmoid; set moe_score_function to sigmoid"
            )
        if (self.moe_num_groups is None) != (self.moe_group_top_k is None):
            raise ValueError(
                "model.moe_num_groups and model.moe_group_top_k: got only one of them; set both or neither"
            )
        if self.moe_num_groups is not None and self.moe_group_top_k is not None:
            if (self.num_experts or 0) % self.moe_num_groups or self.moe_group_top_k > self.moe_num_groups:
                raise ValueError(
                    f"model.moe_num_groups {self.moe_num_groups}: wanted a divisor of model.num_experts "
                    f"{self.num_experts} that is at least model.moe_group_top_k {self.moe_group_top_k}"
                )
            if self.moe_top_k % self.moe_group_top_k:
                raise ValueError(
                    f"model.moe_group_top_k {self.moe_group_top_k} does not divide model.moe_top_k "
                    f"{self.moe_top_k}; Megatron ranks the groups by their best moe_top_k / moe_group_top_k "
                    "experts"
                )
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (
            self.kv_channels is None
            and not self.multi_latent_attention
            and self.hidden_size % self.num_attention_heads
        ):
            raise ValueError(
                f"model.num_attention_heads {self.num_attention_heads} does not divide "
                f"model.hidden_size {self.hidden_size}; change one of the two, or set kv_channels, the width "
                "of a head"
            )
        if self.num_query_groups is not None and self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"model.num_query_groups {self.num_query_groups} does not divide "
                f"model.num_attention_heads {self.num_attention_heads}; change one of the two"
            )
        if self.num_experts is not None and self.moe_top_k > self.num_experts:
            raise ValueError(
                f"model.moe_top_k {self.moe_top_k} is larger than model.num_experts {self.num_experts}; "
                "a token cannot go to more experts than exist, so lower moe_top_k"
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
                f"model.num_layers {self.num_layers}; give one 0 or 1 for each layer"
            )
        if isinstance(self.moe_layer_freq, int) and self.moe_layer_freq < 1:
            raise ValueError(f"model.moe_layer_freq: got {self.moe_layer_freq}, wanted 1 or more")
        return self

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
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
        """Whether a feed-forward layer has two input matrices, where one product gates the other."""
        return self.activation in ("swiglu", "quick_geglu")

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Whether each layer is an MoE layer: one boolean for each of the ``num_layers`` layers."""
        if self.num_experts is None:
            return (False,) * self.num_layers
        if isinstance(self.moe_layer_freq, int):
            return tuple(layer % self.moe_layer_freq == 0 for layer in range(self.num_layers))
        return tuple(bool(is_moe) for is_moe in self.moe_layer_freq)
