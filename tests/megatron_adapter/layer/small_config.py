"""The config of one small MoE layer on CPU ranks, which the tests of layers vary."""

from functools import partial

from ..adapters import adapt
from ..grouped_linear import fake_grouped_experts


def moe_config(world_size, hidden_size, num_experts, **options):
    """Megatron's config of a model with small experts and no auxiliary loss; ``options`` win."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **{
            **{"num_layers": 1, "hidden_size": hidden_size, "num_attention_heads": 1},
            **{"ffn_hidden_size": 16, "moe_ffn_hidden_size": 16, "num_moe_experts": num_experts},
            **{"expert_model_parallel_size": world_size, "moe_token_dispatcher_type": "alltoall"},
            **{"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0},
            **{"use_cpu_initialization": True, "gradient_accumulation_fusion": False},
            "add_bias_linear": False,
            **options,
        }
    )


def build_layer(config, strategy, settings, *, fuses=False, stock=False, adapters="", kind=None):
    """An MoE layer, with stand-ins for grouped linear layers, which may add gradients to ``main_grad``.

    A ``stock`` layer is Megatron's own, from the same submodules. There may be ``adapters`` of a host, and
    ``kind`` makes a subclass of its class.
    """
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer

    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    if config.moe_grouped_gemm:
        spec = partial(spec.func, **{**spec.keywords, "submodules": fake_grouped_experts(spec, fuses=fuses)})
    layer = spec(config=config, pg_collection=None)
    layer.set_layer_number(1)
    if adapters:
        adapt(layer.experts, adapters, fuses=fuses)
    if kind is not None:
        layer.__class__ = kind(type(layer))
    return layer if stock else StrategyMoELayer.of(layer, session_of(strategy, settings))


def session_of(strategy, settings):
    """A session for layers that are built without DDP."""
    from megatron_fssdp.config.strategy.strategy_registry import strategy_settings
    from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession

    validated = strategy_settings(strategy, settings, "settings")
    return StrategySession(strategy, validated)
