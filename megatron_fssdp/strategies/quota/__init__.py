"""``quota``: exact quotas of tokens for each micro-batch, experts follow."""

from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.config.strategy.strategy_settings import SlotKeys


class QuotaSettings(SlotKeys):
    """``quota``: exact quotas of tokens for each micro-batch, experts follow."""


ENTRY = shipped(QuotaSettings, "quota.quota_strategy:QuotaStrategy", "#AA4499")
