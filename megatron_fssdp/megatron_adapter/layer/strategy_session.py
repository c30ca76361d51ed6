"""The requested strategy and the runtime that the layers of a model share."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_fssdp.collectives.plan_agreement import all_ranks_can, check_agreement
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_settings import (
    PlacementSettings,
    StrategySettings,
    checks_plans,
)
from megatron_fssdp.dispatchers.parm import ScheduleSelector
from megatron_fssdp.megatron_adapter.experts.expert_slots import ExpertSlots
from megatron_fssdp.megatron_adapter.layer.transfer_group import (
    DEFAULT_OPTIONS,
    CommunicatorOptions,
    connect_ranks,
    create_transfer_group,
    has_one_queue,
)
from megatron_fssdp.megatron_adapter.routing.topology_aware_router import check_gate
from megatron_fssdp.megatron_adapter.support.dispatch_limits import check_dispatch, needs_fixed_slots
from megatron_fssdp.megatron_adapter.support.node_detection import detect_topology
from megatron_fssdp.megatron_adapter.support.supported_features import (
    RESIDENT_REFUSALS,
    check_supported,
    refuse,
)
from megatron_fssdp.planning.native.kernel import kernel_form, use_plain_kernels
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime
from megatron_fssdp.strategies.registry import build_strategy


class StrategySession:
    """One strategy for one model, with its settings and the runtime that all layers share.

    Layer specs carry it to the layers.

    Args:
        strategy_name: Name of a placement strategy. The strategy ``none`` has no session.
        settings: Validated settings of the strategy.
        timeout: Time-out of the process groups that the session creates; torch's default if ``None``.
        communicators: Megatron's NCCL options by the short names of groups (:mod:`.transfer_group`).

    Attributes:
        strategy: The strategy.
        runtime: The layers' runtime.
        slots: The experts of the pipeline stage, in the slots of this rank.
        selectors: Selectors of Parm's schedules, by the name of the layers' group.
        numbers_of_slots: Numbers of slots for which dispatchers were built.
    """

    def __init__(
        self,
        strategy_name: str,
        settings: PlacementSettings,
        timeout: timedelta | None = None,
        communicators: CommunicatorOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.strategy_name, self.settings = strategy_name, settings
        self.timeout, self.communicators = timeout, communicators
        self.strategy = build_strategy(strategy_name, settings)
        self.runtime = MoERuntime(
            self.strategy,
            measure=settings.record_dir is not None,
            check_plans=checks_plans(),
        )
        self.slots = ExpertSlots()
        self.selectors: dict[str, ScheduleSelector] = {}
        self.numbers_of_slots: set[int] = set()
        self._kernels_agree = False
        self._groups: dict[str, ExpertGroups] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "StrategySession":
        # Megatron deep-copies layer specs. All copies must share this session.
        return self

    def agree_on_kernels(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Run planning kernels in the same form on all ranks of the pipeline stage.

        Every rank plans alone, so no rank should depend on a form that others do not have. The first call is
        collective over these ranks; later calls do nothing.

        Args:
            groups: The rank's groups of expert parallelism, expert tensor parallelism and expert data
                parallelism. Their product has all ranks of the stage.
        """
        if self._kernels_agree:
            return
        is_compiled = kernel_form().is_compiled
        if not all_ranks_can(is_compiled, groups) and is_compiled:
            use_plain_kernels("another rank has no compiled kernels")
        self._kernels_agree = True

    def expert_groups(
        self,
        expert_parallel: dist.ProcessGroup,
        expert_tensor_parallel: dist.ProcessGroup,
        everyone: dist.ProcessGroup | None = None,
    ) -> ExpertGroups:
        """Return the process groups of a layer. The first call for a group is collective over its ranks.

        Args:
            expert_parallel: Expert-parallel group: the ranks that share the layer's experts.
            expert_tensor_parallel: Group of the ranks that share each expert. It has one rank if experts are
                whole.
            everyone: Group of all ranks in the expert-parallel groups of all expert-tensor-parallel peers.
        """
        if expert_parallel.group_name in self._groups:
            return self._groups[expert_parallel.group_name]
        transfers = None
        # Layers can have replicas, also if auto selects a strategy with replicas later. Transfers run beside
        # the dispatch, so they need their own process group.
        strategy = self.strategy
        has_transfers = strategy.overlaps or strategy.selects or strategy.may_replicate(1)
        if has_transfers and expert_parallel.size() > 1:
            transfers = create_transfer_group(expert_parallel, self.timeout, self.communicators)
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
        """Replica slots that a layer has from the start: all that were given if their number must not change.

        Args:
            config: Megatron's ``TransformerConfig``.
        """
        return (getattr(self.settings, "slots", None) or 0) if needs_fixed_slots(config) else 0

    def check_model(self, config: Any) -> None:
        """Refuse a model that the strategy does not support, or settings that do not fit the model.

        Args:
            config: Megatron's parsed arguments or a ``TransformerConfig``.

        Raises:
            ConfigurationError: The model or a setting is refused.
        """
        check_supported(self.strategy_name, config)
        check_dispatch(self.strategy_name, self.strategy, config)
        if self.strategy.resident_slots:
            refuse(f"--moe-strategy {self.strategy_name}", RESIDENT_REFUSALS, config)
        if self.settings.uses_gate:
            check_gate(config)
        n_mp = getattr(config, "tensor_model_parallel_size", 1) or 1
        if n_mp > 1 and not getattr(config, "sequence_parallel", False):
            self._check_equal_tokens(config, n_mp)
        n_esp = getattr(config, "expert_tensor_parallel_size", None) or n_mp
        num_devices = getattr(config, "expert_model_parallel_size", 1) or 1
        if self.strategy.travel.smart_schedule and num_devices > 1 and n_esp > 1:
            raise ConfigurationError(
                f"smart_schedule: got {str(self.strategy.travel.smart_schedule).lower()} with expert tensor "
                f"parallelism over {n_esp} ranks, wanted whole experts; use smart_schedule=false or "
                "--expert-tensor-parallel-size 1"
            )
        num_experts = getattr(config, "num_moe_experts", None) or config.num_experts
        try:  # The nodes of the devices are not known yet.
            self.strategy.check_sizes(num_experts, Topology.uniform(num_devices, 1))
        except ValueError as error:
            raise ConfigurationError(f"--moe-strategy {self.strategy_name}: {error}") from None

    def _check_equal_tokens(self, config: Any, n_mp: int) -> None:
        """Refuse features that fail if tensor-parallel ranks have the same tokens."""
        schedule = self.strategy.travel.schedule
        if getattr(config, "moe_latent_size", None):
            raise ConfigurationError(
                f"--moe-latent-size: got it with {n_mp} tensor-parallel ranks without sequence parallelism, "
                "where its projections get only a part of the tokens; add --sequence-parallel"
            )
        if self.settings.uses_gate and schedule not in ("s1", "megatron"):
            raise ConfigurationError(
                f"router topology_aware with schedule {schedule}: tensor-parallel ranks have to select "
                "the same experts, and this gate selects by the rank's node; use schedule=s1 or "
                "--sequence-parallel"
            )
        seq_length = getattr(config, "seq_length", None) or 0
        tokens = seq_length // (getattr(config, "context_parallel_size", 1) or 1)
        if schedule in ("s1", "megatron") and tokens % n_mp:
            raise ConfigurationError(
                f"--seq-length {seq_length}: got {tokens} tokens of a sequence, wanted a multiple of {n_mp}, "
                "the number of tensor-parallel ranks; change --seq-length, or use --moe-strategy parm "
                "--moe-strategy-set schedule=s2"
            )


@dataclass(frozen=True)
class RequestedStrategy:
    """The name and validated settings of the command line's strategy; ``none`` has no session."""

    name: str
    settings: StrategySettings
    session: StrategySession | None
