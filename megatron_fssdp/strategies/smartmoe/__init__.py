"""``smartmoe``: SmartMoE: owners are exchanged among devices, nothing is replicated."""

from megatron_fssdp.config.loading import setting
from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.config.strategy.strategy_settings import ExchangeKeys


class SmartmoeSettings(ExchangeKeys):
    """``smartmoe``: SmartMoE: owners are exchanged among devices, nothing is replicated."""

    reshard_interval: int = setting(25, "Number of iterations between two exchanges.", ge=1)
    window: int = setting(25, "Number of iterations whose mean load decides the new owners.", ge=1)


ENTRY = shipped(SmartmoeSettings, "smartmoe.smartmoe_strategy:SmartmoeStrategy", "#56B4E9")
