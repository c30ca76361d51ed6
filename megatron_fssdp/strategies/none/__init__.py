"""``none``: Megatron's own dispatcher and experts."""

from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings


class NoneSettings(StrategySettings):
    """``none``: Megatron's own dispatcher and experts."""


ENTRY = shipped(NoneSettings, None, "#7F7F7F", is_ranked=False)
