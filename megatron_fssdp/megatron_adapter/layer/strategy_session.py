"""The requested strategy and the runtime that the layers of a model share."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_fssdp.collectives.plan_agreement import check_agreement
from megatron_fssdp.config.strategy.strategy_settings import (
    PlacementSettings,
    StrategySettings,
    checks_plans,
)
from megatron_fssdp.dispatchers.parm.schedule_selector import ScheduleSelector
from megatron_fssdp.megatron_adapter.experts.expert_slots import ExpertSlots
from megatron_fssdp.megatron_adapter.layer.transfer_group import (
    DEFAULT_OPTIONS,
    connect_ranks,
    create_transfer_group,
    has_one_queue,
)
from megatron_fssdp.megatron_adapter.support.limits import Facts, check_limits
from megatron_fssdp.megatron_adapter.support.node_detection import detect_topology
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime
from megatron_fssdp.strategies.registry import build_strategy


class StrategySession:
    """One strategy for one model, with its settings and the runtime that all layers share.

    Layer specs carry it to the layers. The time-out and the NCCL options are those of the process groups that
    the session creates (:mod:`.transfer_group`). The strategy ``none`` has no session.

    Attributes:
        strategy: The strategy.
        runtime: The layers' runtime.
        slots: The stage's experts in slots of this rank.
        selectors: Selectors of Parm's schedules, by the name of the layers' group.
        numbers_of_slots: Numbers of slots for which dispatchers were built.
    """

    def __init__(
        self,
        strategy_name: str,
        settings: PlacementSettings,
        timeout: timedelta | None = None,
        nccl_options: dict[str, Any] = DEFAULT_OPTIONS,
    ) -> None:
        self.strategy_name, self.settings = strategy_name, settings
        self.timeout, self.nccl_options = timeout, nccl_options
        self.strategy = build_strategy(strategy_name, settings)
        is_recorded = settings.record_dir is not None
        self.runtime = MoERuntime(self.strategy, measure=is_recorded, check_plans=checks_plans())
        self.slots = ExpertSlots()
        self.selectors: dict[str, ScheduleSelector] = {}
        self.numbers_of_slots: set[int] = set()
        self._groups: dict[str, ExpertGroups] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "StrategySession":
        # Megatron deep-copies layer specs. All copies must share this session.
        return self

    def expert_groups(
        self,
        expert_parallel: dist.ProcessGroup,
        expert_tensor_parallel: dist.ProcessGroup,
        everyone: dist.ProcessGroup | None = None,
    ) -> ExpertGroups:
        """Return the process groups of a layer. The first call for a group is collective over its ranks.

        ``expert_tensor_parallel`` has the ranks that share each expert, and ``everyone`` all ranks in the
        expert-parallel groups of these ranks.
        """
        if expert_parallel.group_name in self._groups:
            return self._groups[expert_parallel.group_name]
        transfers = None
        # Layers can have replicas, also if auto selects a strategy with replicas later. Transfers run beside
        # the dispatch, so they need their own process group.
        strategy = self.strategy
        has_transfers = strategy.overlaps or strategy.selects or strategy.may_replicate(1)
        if has_transfers and expert_parallel.size() > 1:
            transfers = create_transfer_group(expert_parallel, self.timeout, self.nccl_options)
        topology = detect_topology(expert_parallel, self.settings.nodes)
        peers = expert_tensor_parallel if expert_tensor_parallel.size() > 1 else None
        if peers is not None:
            # Plans depend on the topology, and peers must have equal plans.
            check_agreement(repr(topology).encode(), peers, "the experts' node layout")
        groups = self._groups[expert_parallel.group_name] = ExpertGroups(
            expert_parallel,
            topology,
            transfers,
            peers,
            everyone if peers is not None else None,
            one_queue=has_one_queue(expert_parallel),
        )
        if transfers is not None:
            connect_ranks(transfers)
        return groups

    def least_slots(self, config: Any) -> int:
        """Replica slots that a layer has from the start: all that were given if their number is fixed."""
        return (getattr(self.settings, "slots", None) or 0) if Facts(config)["needs_fixed_slots"] else 0

    def check_model(self, config: Any) -> None:
        """Refuse, by a ConfigurationError, a model of Megatron's arguments or of a ``TransformerConfig``."""
        check_limits(self.strategy_name, self.strategy, config)


@dataclass(frozen=True)
class RequestedStrategy:
    """The name and validated settings of the command line's strategy; ``none`` has no session."""

    name: str
    settings: StrategySettings
    session: StrategySession | None
