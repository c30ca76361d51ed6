"""``prophet``: Pro-Prophet: hot experts on some of the devices, planned ahead."""

from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.strategies.prophet.prophet_settings import ProphetSettings

ENTRY = shipped(ProphetSettings, "prophet.prophet_strategy:ProphetStrategy", "#CC79A7", is_candidate=True)
