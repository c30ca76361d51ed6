"""``parm``: Parm: schedules for tensor, expert and expert tensor parallelism together."""

from megatron_fssdp.config.loading import setting
from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.config.strategy.strategy_settings import CollectiveOrder, PlacementSettings


class ParmSettings(PlacementSettings):
    """``parm``: Parm: schedules for tensor, expert and expert tensor parallelism together."""

    schedule: CollectiveOrder = setting(
        "auto",
        "Order of the collectives. 's1' divides the tokens of tensor-parallel ranks before the gate, 's2' "
        "after it (Parm §III-B); under sequence parallelism both are the same. 'baseline' is "
        "DeepSpeed-MoE's order. 'megatron' divides the tokens as s1 does and runs Megatron's collectives "
        "of sequence parallelism. 'auto' selects among s1, s2 and megatron the one with the fewest "
        "modelled seconds for the layer's shape.",
    )


# What is Parm's own is how tokens travel, which is the runtime's business; owners stay.
ENTRY = shipped(ParmSettings, "ep.ep_strategy:EpStrategy", "#999933", is_ranked=False)
