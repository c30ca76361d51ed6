"""``smartmoe``: SmartMoE: owners are exchanged among devices, nothing is replicated."""

from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.strategies.smartmoe.smartmoe_settings import SmartmoeSettings

ENTRY = shipped(SmartmoeSettings, "smartmoe.smartmoe_strategy:SmartmoeStrategy", "#56B4E9", is_candidate=True)
