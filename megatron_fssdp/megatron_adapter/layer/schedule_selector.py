"""Which of Parm's schedules a layer's forward passes take, and why (Parm, §V-B, Alg. 1)."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fssdp.config.cluster_files import load_cluster
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.support.node_detection import detect_topology
from megatron_fssdp.planning.cost.cluster_cost import schedule_costs
from megatron_fssdp.planning.cost.tensor_schedules import (
    Group,
    Schedule,
    ScheduleCosts,
    ScheduledLayer,
    best_schedule,
    predicted_seconds,
)
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.exchange.schedule_costs import measured_costs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """What a forward pass does.

    Attributes:
        schedule: The order of collectives.
        simultaneous: Whether s2 hands results on slice by slice (SAA).
        predicted_s: Modelled seconds of each candidate's collectives in a forward pass; empty where
            nothing was compared.
    """

    schedule: Schedule
    simultaneous: bool
    predicted_s: Mapping[Schedule, float] = field(default_factory=dict)


@dataclass(eq=False)
class ScheduleSelector:
    """Decides for all layers of a model that have the same groups; the same on all ranks of a stage.

    Attributes:
        setting: A schedule, or ``auto``.
        config: Megatron's ``TransformerConfig``.
        groups: The layers' process groups.
        n_mp: Tensor-parallel ranks.
        everyone: All ranks of the pipeline stage, which measure together.
        simultaneous: Whether s2 may hand results on slice by slice, where slices are large enough.
        cluster: Description to count with instead of measuring.
        nodes: Declared number of nodes.
    """

    setting: str
    config: Any
    groups: ExpertGroups
    n_mp: int
    everyone: dist.ProcessGroup
    simultaneous: bool = True
    cluster: Path | None = None
    nodes: int | None = None
    _decisions: dict[tuple[torch.Size, bool], Decision] = field(init=False, default_factory=dict)
    _costs: ScheduleCosts | None = field(init=False, default=None)

    def of(self, hidden: torch.Tensor, *, owners_only: bool = True) -> Decision:
        """The decision for a forward pass; collective over the stage where ``auto`` has yet to measure.

        Args:
            hidden: The layer's input, ``[S, B, M]``.
            owners_only: Whether there are no replicas, with which s2 cannot work.

        Raises:
            ConfigurationError: The schedule cannot divide so many tokens.
        """
        shape, key = hidden.shape, (hidden.shape, owners_only)
        if key not in self._decisions:
            if self.setting != "auto":
                schedule: Schedule = self.setting  # type: ignore[assignment]
                self._decisions[key] = Decision(schedule, self._simultaneous(self._layer(hidden)))
            elif self._decisions and self.config.variable_seq_lengths:
                # Ranks would decide differently about their sequences. Let all stay with the first.
                first = next((one for (_, only), one in self._decisions.items() if only == owners_only), None)
                self._decisions[key] = first or self._decide(hidden, owners_only)
            else:
                self._decisions[key] = self._decide(hidden, owners_only)
            self._check(shape, self._decisions[key].schedule)
        return self._decisions[key]

    def _check(self, shape: torch.Size, schedule: Schedule) -> None:
        peers = self.groups.tensor_parallel
        if peers is not None and schedule in ("s1", "megatron") and shape[0] % peers.size():
            raise ConfigurationError(
                f"schedule {schedule}: got sequences of {shape[0]} tokens on {peers.size()} tensor-parallel "
                "ranks, wanted a multiple; change --seq-length, or use --moe-strategy parm "
                "--moe-strategy-set schedule=s2"
            )

    def _decide(self, hidden: torch.Tensor, owners_only: bool) -> Decision:
        layer = self._layer(hidden)
        candidates: list[Schedule] = ["s1", "s2", "megatron"]
        if self.groups.tensor_parallel is None or not owners_only:
            candidates.remove("s2")  # without equal tokens it is s1
        elif hidden.shape[0] % self.n_mp:
            candidates = ["s2"]
        if self.groups.num_parts == 1 and "megatron" in candidates:
            candidates.remove("megatron")  # with whole experts it is s1
        predicted: dict[Schedule, float] = {}
        if len(candidates) > 1:
            if self._costs is None:
                self._costs = self._find_costs(layer, hidden)
            predicted = predicted_seconds(layer, self._costs, tuple(candidates))
        best = best_schedule(predicted) if predicted else candidates[0]
        decision = Decision(best, self._simultaneous(layer), predicted)
        is_shared = self.groups.tensor_parallel is not None or self.groups.num_parts > 1
        if self.everyone.rank() == 0 and is_shared:
            logger.warning(self._described(layer, decision))
        return decision

    def _layer(self, hidden: torch.Tensor) -> ScheduledLayer:
        config, is_split = self.config, self.groups.tensor_parallel is None
        own_tokens = hidden.shape[0] * hidden.shape[1]
        # Of one tensor-parallel group; under sequence parallelism its ranks have a part each.
        num_tokens = own_tokens * (self.n_mp if is_split else 1)
        share = 1.0
        if config.moe_expert_capacity_factor is not None:
            factor = float(config.moe_expert_capacity_factor)
            share = factor if config.moe_pad_expert_input_to_capacity else min(1.0, factor)
        return ScheduledLayer(
            num_tokens=num_tokens,
            hidden_size=hidden.shape[2],
            num_rows=config.moe_router_topk * share * num_tokens,
            n_mp=self.n_mp,
            n_esp=self.groups.num_parts,
            n_ep=self.groups.num_devices,
            element_bytes=hidden.element_size(),
            is_split=is_split,
        )

    def _find_costs(self, layer: ScheduledLayer, hidden: torch.Tensor) -> ScheduleCosts:
        groups = self.groups
        if self.cluster is not None:
            members: dict[Group, dist.ProcessGroup | None] = {
                "ep": groups.expert_parallel,
                "esp": groups.expert_tensor_parallel,
                "ep_esp": groups.parts or groups.expert_parallel,
                "mp": groups.tensor_parallel,
            }
            found = {
                name: self._ranks_and_near(group) for name, group in members.items() if group is not None
            }
            return schedule_costs(load_cluster(self.cluster), found)
        like = hidden.detach().reshape(-1, hidden.shape[-1])
        return measured_costs(layer, like, groups, self.everyone, simultaneous=self._simultaneous(layer))

    def _simultaneous(self, layer: ScheduledLayer) -> bool:
        # By the shape, not by what is routed: all ranks have to take the same steps.
        return self.simultaneous and layer.slices_pay

    def _ranks_and_near(self, group: dist.ProcessGroup) -> tuple[int, int]:
        node_D = detect_topology(group, self.nodes).node_of_device
        # Ranks have to decide alike: the fewest neighbours of any.
        return len(node_D), min(list(node_D).count(node) for node in node_D) - 1

    def _described(self, layer: ScheduledLayer, decision: Decision) -> str:
        why = "nothing else is possible"
        if decision.predicted_s:
            why = ", ".join(f"{name} {1e3 * s:.3f} ms" for name, s in decision.predicted_s.items())
        return (
            f"[fssdp] schedule {decision.schedule} for {layer.num_tokens:,.0f} tokens and "
            f"{layer.num_rows:,.0f} rows of a tensor-parallel group (forward pass's collectives: {why})"
        )
