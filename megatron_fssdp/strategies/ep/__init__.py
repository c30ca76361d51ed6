"""``ep``: plain expert parallelism: every expert stays with its owner.

FasterMoE's smart schedule and gate and Parm's ``schedule`` also belong to it, to be studied alone.
"""

from typing import Literal

from megatron_fssdp.config.loading import setting
from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.config.strategy.strategy_settings import ExchangeKeys, FasterMoEKeys


class EpSettings(ExchangeKeys, FasterMoEKeys):
    """``ep``: plain expert parallelism: every expert stays with its owner."""

    schedule: Literal["megatron", "s1"] = setting(
        "megatron",
        "Order of the collectives under expert tensor parallelism. 'megatron' sends tokens to one part of "
        "an expert, and from there to the others. 's1' is Parm's EP&ESP-AlltoAll, which sends tokens to "
        "all parts at once, with fewer steps and more bytes between nodes.",
    )


ENTRY = shipped(EpSettings, "ep.ep_strategy:EpStrategy", "#0072B2")
