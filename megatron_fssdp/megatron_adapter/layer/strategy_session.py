"""The strategy of one model, and the runtime and process groups that its layers share."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fssdp.collectives.all_ranks import check_agreement
from megatron_fssdp.collectives.messages import connect_pairs
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import load_yaml
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings, checks_plans, puts_weights
from megatron_fssdp.dispatchers.parm.schedule_selector import ScheduleSelector
from megatron_fssdp.megatron_adapter.experts.expert_slots import ExpertSlots
from megatron_fssdp.megatron_adapter.support.limits import check_limits
from megatron_fssdp.megatron_adapter.support.megatron_settings import MegatronSettings, check_known
from megatron_fssdp.megatron_adapter.support.node_detection import detect_topology
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime
from megatron_fssdp.runtime.slots.node_slots import NodeSlots
from megatron_fssdp.strategies.registry import build_strategy

# Name of the group of transfers in Megatron's file of NCCL options (--nccl-communicator-config-path).
SHORT_NAME = "fssdp"
# Transfers run beside compute. On streams of high priority, their kernels are scheduled first. Few CTAs leave
# the other SMs to compute, and bound the buffers of channels.
DEFAULT_OPTIONS = {"is_high_priority_stream": True, "max_ctas": 8}


class StrategySession:
    """One strategy but ``none`` for one model, with its settings and the runtime that all layers share.

    NCCL options are those of the groups of transfers that it creates.
    """

    def __init__(
        self, strategy_name: str, settings: PlacementSettings, options: dict[str, Any] = DEFAULT_OPTIONS
    ) -> None:
        self.strategy_name, self.settings, self._nccl_options = strategy_name, settings, options
        self.strategy = build_strategy(strategy_name, settings)
        is_recorded = settings.record_dir is not None
        self.runtime = MoERuntime(self.strategy, measure=is_recorded, check_plans=checks_plans())
        self.slots = ExpertSlots()  # of this rank, with the stage's experts
        self.selectors: dict[dist.ProcessGroup, ScheduleSelector] = {}  # of Parm, by the layers' group
        self.numbers_of_slots: set[int] = set()  # for which dispatchers were built
        self._groups: dict[dist.ProcessGroup, ExpertGroups] = {}

    def expert_groups(
        self,
        expert_parallel: dist.ProcessGroup,
        expert_tensor_parallel: dist.ProcessGroup,
        everyone: dist.ProcessGroup | None = None,
    ) -> ExpertGroups:
        """Return the process groups of a layer. The first call for a group is collective over its ranks.

        ``everyone`` are all ranks in the expert-parallel groups of the ranks that share an expert.
        """
        if expert_parallel in self._groups:
            return self._groups[expert_parallel]
        transfers = None
        # Transfers run beside the dispatch, so they need their own process group. Layers can have replicas
        # also if auto selects a strategy with replicas later.
        strategy = self.strategy
        has_transfers = strategy.overlaps or strategy.selects or strategy.may_replicate(1)
        if has_transfers and expert_parallel.size() > 1:
            transfers = create_transfer_group(expert_parallel, self._nccl_options)
        topology = detect_topology(expert_parallel, self.settings.nodes)
        puts = transfers is not None and puts_weights()
        peers = expert_tensor_parallel if expert_tensor_parallel.size() > 1 else None
        if peers is not None:
            # Plans depend on the topology, and peers must have equal plans.
            check_agreement(repr(topology).encode(), "the experts' node layout", peers)
        groups = self._groups[expert_parallel] = ExpertGroups(
            expert_parallel,
            topology,
            transfers,
            peers,
            everyone if peers is not None else None,
            one_queue=has_one_queue(expert_parallel),
            node=create_node_slots(expert_parallel, topology) if puts else None,
        )
        return groups

    def least_slots(self, settings: MegatronSettings) -> int:
        """Replica slots that a layer has from the start: all that were given if their number is fixed."""
        is_fixed = settings.captures_preprocess or settings.flex == "ncclep"
        return (getattr(self.settings, "slots", None) or 0) if is_fixed else 0

    def check_model(self, *sources: Any, defaults: Mapping[str, Any] | None = None) -> MegatronSettings:
        """Read settings of arguments with defaults, or of configs; a ConfigurationError refuses them."""
        settings = MegatronSettings.of(*sources)
        check_limits(self.strategy_name, self.strategy, settings)
        for source in sources:
            check_known(f"--moe-strategy {self.strategy_name}", source, defaults)
        return settings


def nccl_options(host: Any) -> dict[str, Any]:
    """Return the transfer group's NCCL options, also of the file that Megatron's arguments name."""
    path = host.nccl_communicator_config_path
    return DEFAULT_OPTIONS | ((load_yaml(path).get(SHORT_NAME) if path else None) or {})


def create_transfer_group(expert_parallel: dist.ProcessGroup, options: dict[str, Any]) -> dist.ProcessGroup:
    """Create a second process group of the expert-parallel ranks, and connect them; collective over them.

    Megatron's function creates it, because Megatron may change the time-outs of all groups that it has
    created. Where the default group is bound to a device, torch would split the default group's communicator,
    and all ranks of the training would have to take part. So it counts as unbound meanwhile.
    """
    everyone: Any = dist.group.WORLD
    on_nccl = dist.get_backend(expert_parallel) == "nccl"
    nccl = parallel_state.get_nccl_options(SHORT_NAME, {SHORT_NAME: options}) if on_nccl else None
    bound, everyone.bound_device_id = everyone.bound_device_id, None
    try:
        group: dist.ProcessGroup = parallel_state.create_group(
            dist.get_process_group_ranks(expert_parallel),
            timeout=_timeout_of(expert_parallel),
            pg_options=nccl,
            use_local_synchronization=True,
            group_desc="FSSDP_TRANSFER_GROUP",
        )
    finally:
        everyone.bound_device_id = bound
    if on_nccl:
        # NCCL would open each connection when the first message needs it, in the middle of the training.
        connect_pairs(group, torch.device("cuda", torch.cuda.current_device()))
    return group


def create_node_slots(expert_parallel: dist.ProcessGroup, topology: Topology) -> NodeSlots | None:
    """Create the slots that the ranks of this node write to; collective. ``None`` if a rank is alone in it.

    Raises:
        ConfigurationError: No node has two ranks of the group, or one queue would hold up compute.
    """
    if topology.smallest_and_largest_node[1] == 1 or has_one_queue(expert_parallel):
        raise ConfigurationError(
            "FSSDP_PEER_PUTS: got nodes with one rank of an expert-parallel group, or "
            "CUDA_DEVICE_MAX_CONNECTIONS=1, wanted two ranks in a node and several connections; unset it"
        )
    devices = topology.devices_by_node[topology.node_of_device_D[expert_parallel.rank()]]
    ranks = dist.get_process_group_ranks(expert_parallel)
    timeout = _timeout_of(expert_parallel) or dist.default_pg_timeout
    if len(devices) == 1:
        return None
    # It is for the rendezvous alone. Under NCCL, torch could split it from the default group's communicator.
    group: Any = dist.new_group(
        [ranks[device] for device in devices], timeout, "gloo", use_local_synchronization=True
    )
    return NodeSlots(group, devices, timeout)


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The time-out of a group's collectives; groups that are made later do not inherit it."""
    backend: Any = group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))
    return getattr(getattr(backend, "options", None), "_timeout", None)


def has_one_queue(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of a group are CUDA devices that run all kernels in the order of their issue."""
    return dist.get_backend(group) == "nccl" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
