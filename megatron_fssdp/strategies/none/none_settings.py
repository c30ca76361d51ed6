"""The keys of ``none``."""

from megatron_fssdp.config.strategy.strategy_settings import StrategySettings


class NoneSettings(StrategySettings):
    """``none``: Megatron's own dispatcher and experts."""
