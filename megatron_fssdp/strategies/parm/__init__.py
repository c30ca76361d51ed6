"""``parm``: Parm: schedules for tensor, expert and expert tensor parallelism together."""

from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.strategies.parm.parm_settings import ParmSettings

# What is Parm's own is how tokens travel, which is the runtime's business; owners stay.
ENTRY = shipped(ParmSettings, "ep.ep_strategy:EpStrategy", "#999933", is_ranked=False)
