"""``ep``: plain expert parallelism: every expert stays with its owner."""

from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.strategies.ep.ep_settings import EpSettings

ENTRY = shipped(EpSettings, "ep.ep_strategy:EpStrategy", "#0072B2")
