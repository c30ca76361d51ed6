"""``fastermoe``: FasterMoE: the hottest experts of each micro-batch on all devices."""

from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.strategies.fastermoe.fastermoe_settings import FastermoeSettings

ENTRY = shipped(
    FastermoeSettings, "fastermoe.fastermoe_strategy:FastermoeStrategy", "#009E73", is_candidate=True
)
