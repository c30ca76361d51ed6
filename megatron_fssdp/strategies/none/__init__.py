"""``none``: Megatron's own dispatcher and experts."""

from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.strategies.none.none_settings import NoneSettings

ENTRY = shipped(NoneSettings, None, "#7F7F7F", is_ranked=False)
