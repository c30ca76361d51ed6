"""``fastermoe``: FasterMoE: the hottest experts of each micro-batch on all devices."""

from typing import Literal

from megatron_fssdp.config.loading import setting
from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.config.strategy.strategy_settings import NO_SLOTS, FasterMoEKeys, SlotKeys


class FastermoeSettings(SlotKeys, FasterMoEKeys):
    """``fastermoe``: FasterMoE: the hottest experts of each micro-batch on all devices."""

    latency: Literal["complete", "paper", "authors"] = setting(
        "complete",
        "Latency that a shadow must reduce. 'paper' is FasterMoE's Eq. 8, which ignores the tokens that "
        "are still sent, and therefore shadows an expert even under balanced loads. 'complete' counts "
        "them. 'authors' is Eq. 8 as in the authors' scripts, which divide a shadow's transfers by the "
        "number of devices.",
        no_effect_if=NO_SLOTS,
    )


ENTRY = shipped(FastermoeSettings, "fastermoe.fastermoe_strategy:FastermoeStrategy", "#009E73")
