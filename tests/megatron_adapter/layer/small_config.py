"""The config of one small MoE layer on CPU ranks, which the tests of layers vary."""

from typing import Any


def moe_config(world_size: int, hidden_size: int, num_experts: int, **options: Any) -> Any:
    """Megatron's config of a model whose layers have experts of 16 hidden units and no auxiliary loss.

    Args:
        world_size: Number of expert-parallel ranks.
        hidden_size: Model dimension.
        num_experts: Number of experts of a layer.
        options: Further settings of ``TransformerConfig``; they replace those given here.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **{
            "num_layers": 1,
            "hidden_size": hidden_size,
            "num_attention_heads": 1,
            "ffn_hidden_size": 16,
            "moe_ffn_hidden_size": 16,
            "num_moe_experts": num_experts,
            "expert_model_parallel_size": world_size,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "add_bias_linear": False,
            **options,
        }
    )
