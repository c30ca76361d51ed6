"""Layer specs for users who build models from megatron-core's specs.

All layers of a model should share one session, which has the loads and counts the iterations. A call without
a session starts one for ``strategy``, by default that of the command line, and its ``settings``, which have
the keys of its YAML file. Without a strategy, or with invalid settings, it raises a ConfigurationError.

Transformer Engine's modules are used by default if it is installed and the config, where there is one,
requests it. Options are those of Megatron's functions.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_registry import strategy_settings
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings
from megatron_fssdp.megatron_adapter.cpu import cpu_runtime
from megatron_fssdp.megatron_adapter.entry.registration import requested_strategy
from megatron_fssdp.megatron_adapter.layer.bert_layers import stock_spec, with_experts
from megatron_fssdp.megatron_adapter.layer.hybrid_layers import with_layer
from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.megatron_adapter.support.capabilities import check_seams


def start_session(strategy: str, settings: Mapping[str, Any] | None = None) -> StrategySession | None:
    """Start a session: one strategy for all layers of one model; ``None`` for the strategy ``none``.

    Call it before the model is built: as ``register``, it makes Megatron run on the CPU where it must.
    """
    check_seams(for_training=False)
    cpu_runtime.install()
    validated = strategy_settings(strategy, dict(settings or {}), "settings")
    return StrategySession(strategy, validated) if isinstance(validated, PlacementSettings) else None


def get_moe_module_spec(
    use_te: bool | None = None,
    *,
    strategy: str | None = None,
    settings: Mapping[str, Any] | None = None,
    session: StrategySession | None = None,
    **options: Any,
) -> Any:
    """Return Megatron's MoE module spec with a strategy: a builder for ``mlp`` of a transformer layer."""
    session = _session(strategy, settings, session)
    use_te = HAVE_TE if use_te is None else use_te
    return _with_session(moe_module_specs.get_moe_module_spec(use_te=use_te, **options), session)


def get_gpt_decoder_block_spec(
    config: Any,
    use_transformer_engine: bool | None = None,
    *,
    vp_stage: int | None = None,  # Megatron looks for this name in the signature.
    strategy: str | None = None,
    settings: Mapping[str, Any] | None = None,
    session: StrategySession | None = None,
    **options: Any,
) -> Any:
    """Return Megatron's GPT decoder block spec of this pipeline stage, with a strategy in its MoE layers.

    It can be used as ``--spec megatron_fssdp get_gpt_decoder_block_spec``. Call it after
    ``parallel_state.initialize_model_parallel``, which knows the layers of this rank.
    """
    session = _session(strategy, settings, session)
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=_uses_te(config, use_transformer_engine),
        vp_stage=vp_stage,
        **{"normalization": config.normalization, "qk_l2_norm": config.qk_l2_norm, **options},
    )
    for layer in block.layer_specs:
        layer.submodules.mlp = _with_session(layer.submodules.mlp, session)
    return block


def get_bert_layer_spec(
    config: Any,
    use_transformer_engine: bool | None = None,
    *,
    strategy: str | None = None,
    settings: Mapping[str, Any] | None = None,
    session: StrategySession | None = None,
) -> Any:
    """Return a spec for ``transformer_layer_spec`` of a ``BertModel``, which must have experts."""
    if config.num_moe_experts is None:
        raise ConfigurationError(
            "spec: got a config without num_moe_experts, wanted a model with experts; set num_moe_experts"
        )
    session = _session(strategy, settings, session)
    spec = with_experts(stock_spec(_uses_te(config, use_transformer_engine)), config)
    experts = spec.params["experts"]
    experts.mlp = _with_session(experts.mlp, session)
    return spec


def _uses_te(config: Any, asked: bool | None) -> bool:
    return (HAVE_TE and config.transformer_impl == "transformer_engine") if asked is None else asked


def _session(
    strategy: str | None, settings: Mapping[str, Any] | None, session: StrategySession | None
) -> StrategySession | None:
    if session is not None:
        if strategy is not None or settings is not None:
            raise ConfigurationError(
                "spec: got a session and a strategy, wanted one of them; a session has a strategy already"
            )
        return session
    if strategy is not None:
        return start_session(strategy, settings)
    requested = requested_strategy()
    if requested is None:
        raise ConfigurationError(
            "spec: got no strategy, wanted one; pass a name such as strategy='fssdp', or start the script "
            "with python -m megatron_fssdp and --moe-strategy"
        )
    return requested.session


def _with_session(mlp: Any, session: StrategySession | None) -> Any:
    return mlp if session is None else with_layer(mlp, partial(StrategyMoELayer, session=session))
