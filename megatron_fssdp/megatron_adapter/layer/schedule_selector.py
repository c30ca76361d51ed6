"""Selects the schedule (Parm's order of collectives) of a layer's forward passes (Parm, §V-B, Alg. 1)."""

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
    """The schedule of a forward pass, and the reason for it.

    Attributes:
        schedule: Order of the collectives.
        simultaneous: Whether schedule ``s2`` passes results on slice by slice (Parm's SAA).
        predicted_s: Modelled seconds of the collectives of one forward pass, for each candidate; empty if
            no candidates were compared.
    """

    schedule: Schedule
    simultaneous: bool
    predicted_s: Mapping[Schedule, float] = field(default_factory=dict)


@dataclass(eq=False)
class ScheduleSelector:
    """Selects the schedule for all layers of a model with the same process groups.

    All ranks of a pipeline stage make the same selection.

    Attributes:
        setting: Name of a schedule, or ``auto``.
        config: Megatron's ``TransformerConfig``.
        groups: Process groups of the layers.
        n_mp: Number of tensor-parallel ranks.
        everyone: Process group of all ranks of the pipeline stage, which measure together.
        simultaneous: Whether schedule ``s2`` may pass results on slice by slice if slices are large enough.
        cluster: File of a cluster description whose costs replace measured costs; ``None`` to measure.
        nodes: Declared number of nodes; ``None`` to detect them.
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
        """Return the decision for a forward pass.

        Under ``auto`` the first call measures collectives and is collective over the pipeline stage.

        Args:
            hidden: Input of the layer, ``[sequence, batch, M]``.
            owners_only: Whether the layer has no replicas. Schedule ``s2`` does not support replicas.

        Raises:
            ConfigurationError: The schedule cannot divide the sequence evenly.
        """
        shape, key = hidden.shape, (hidden.shape, owners_only)
        if key not in self._decisions:
            if self.setting != "auto":
                schedule: Schedule = self.setting  # type: ignore[assignment]
                self._decisions[key] = Decision(schedule, self._simultaneous(self._layer(hidden)))
            elif self._decisions and self.config.variable_seq_lengths:
                # Sequence lengths differ between ranks here, so ranks could decide differently. All of them
                # keep the first decision.
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
                f"schedule {schedule}: got sequences of {shape[0]} tokens, wanted a multiple of "
                f"{peers.size()}, the number of tensor-parallel ranks; change --seq-length, or use "
                "--moe-strategy parm --moe-strategy-set schedule=s2"
            )

    def _decide(self, hidden: torch.Tensor, owners_only: bool) -> Decision:
        layer = self._layer(hidden)
        candidates: list[Schedule] = ["s1", "s2", "megatron"]
        if self.groups.tensor_parallel is None or not owners_only:
            # If tensor-parallel ranks have different tokens, s2 equals s1. It does not support replicas.
            candidates.remove("s2")
        elif hidden.shape[0] % self.n_mp:
            candidates = ["s2"]
        if self.groups.num_parts == 1 and "megatron" in candidates:
            candidates.remove("megatron")  # With whole experts, megatron equals s1.
        predicted: dict[Schedule, float] = {}
        if len(candidates) > 1:
            if self._costs is None:
                self._costs = self._find_costs(layer, hidden)
            predicted = predicted_seconds(layer, self._costs, tuple(candidates))
        best = best_schedule(predicted) if predicted else candidates[0]
        decision = Decision(best, self._simultaneous(layer), predicted)
        is_shared = self.groups.tensor_parallel is not None or self.groups.num_parts > 1
        if self.everyone.rank() == 0 and is_shared:
            logger.info(self._described(layer, decision))
        return decision

    def _layer(self, hidden: torch.Tensor) -> ScheduledLayer:
        config, is_split = self.config, self.groups.tensor_parallel is None
        own_tokens = hidden.shape[0] * hidden.shape[1]
        # Tokens are counted for a whole tensor-parallel group. Under sequence parallelism, each of its ranks
        # has a part of them.
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
        # The shape decides and not the routing, because all ranks must take the same steps.
        return self.simultaneous and layer.slices_pay

    def _ranks_and_near(self, group: dist.ProcessGroup) -> tuple[int, int]:
        node_D = detect_topology(group, self.nodes).node_of_device
        # All ranks must decide alike, so the smallest number of neighbours in a node counts for all.
        return len(node_D), min(list(node_D).count(node) for node in node_D) - 1

    def _described(self, layer: ScheduledLayer, decision: Decision) -> str:
        why = "the only possible one"
        if decision.predicted_s:
            why = ", ".join(f"{name} {1e3 * s:.3f} ms" for name, s in decision.predicted_s.items())
        return (
            f"[fssdp] schedule {decision.schedule} for {layer.num_tokens:,.0f} tokens and "
            f"{layer.num_rows:,.0f} rows of a tensor-parallel group (collectives of a forward pass: {why})"
        )
