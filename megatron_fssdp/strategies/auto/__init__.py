"""``auto``: for each layer the strategy with the fewest modelled seconds."""

from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.strategies.auto.auto_settings import AutoSettings

ENTRY = shipped(AutoSettings, "auto.auto_strategy:build_auto", "#8C564B", is_ranked=False)
