"""The keys of ``quota``."""

from megatron_fssdp.config.strategy.strategy_settings import SlotKeys


class QuotaSettings(SlotKeys):
    """``quota``: exact quotas of tokens for each micro-batch, experts follow."""
