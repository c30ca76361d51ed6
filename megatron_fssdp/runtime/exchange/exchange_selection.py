"""The exchange of one forward pass, by the name of its schedule."""

from megatron_fssdp.planning.cost.tensor_schedules import Schedule
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.exchange.row_exchanges.baseline_exchange import BaselineExchange
from megatron_fssdp.runtime.exchange.row_exchanges.deduplicated_exchange import DeduplicatedExchange
from megatron_fssdp.runtime.exchange.row_exchanges.megatron_exchange import MegatronExchange
from megatron_fssdp.runtime.exchange.row_exchanges.s1_exchange import S1Exchange
from megatron_fssdp.runtime.exchange.row_exchanges.s2_exchange import S2Exchange


def exchange_of(
    schedule: Schedule,
    groups: ExpertGroups,
    *,
    simultaneous: bool = True,
    deduplicated: bool = False,
    most_choices: int | None = None,
) -> MegatronExchange:
    """The exchange of one forward pass under a schedule.

    Args:
        schedule: Name of the schedule. ``s2`` equals ``s1`` if tensor-parallel ranks have different tokens.
        groups: Process groups of the layer's expert, expert-tensor and tensor parallelism.
        simultaneous: Whether ``s2`` uses SAA or runs one collective after the other.
        deduplicated: Whether schedule ``megatron`` sends a token once to each node and device.
        most_choices: Largest number of experts that a token selects; ``None`` if it is not known.
    """
    if schedule == "baseline":
        return BaselineExchange(groups)
    if schedule == "megatron":
        # One device has no wire to save, and its tokens without experts would not pass through a hop.
        if deduplicated and groups.num_devices > 1:
            return DeduplicatedExchange(groups, most_choices)
        return MegatronExchange(groups)
    if schedule == "s2" and groups.tensor_parallel is not None:
        return S2Exchange(groups, simultaneous=simultaneous)
    return S1Exchange(groups)
