"""Loads, bytes and times of one layer in an iteration, for the load history and for reports.

Shape letters: D devices, E experts, N nodes.
"""

from dataclasses import dataclass, field

import numpy as np

from megatron_fssdp.collectives.transfer_lanes import TransferTimer
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.clocks.pass_timer import PassSeconds
from megatron_fssdp.strategies.layer_plan import LayerContext


@dataclass
class LayerLoad:
    """What one layer did in one iteration, summed over its micro-batches and all its devices.

    A pair is a token together with one of its selected experts.

    Attributes:
        layer: Megatron's layer number.
        counts_DE: Pairs by source device and expert, int64 ``[D, E]``.
        owner_D: Pairs that each device would compute under plain expert parallelism, int64 ``[D]``.
        device_D: Pairs that each device computed under the placement in use, int64 ``[D]``.
        by_nodes_N: Tokens whose experts have their owners under plain expert parallelism on 1, 2, … N nodes,
            int64 ``[N]``.
        by_devices_D: Tokens whose experts have these owners on 1, 2, … D devices, int64 ``[D]``.
        num_replicas: Number of replicas in the plan that has most of them; micro-batches may have own plans.
        spag_bytes, sprs_bytes: Bytes that SparseAllGather and SparseReduceScatter moved between devices.
        cross_node_tokens: Number of pairs that were dispatched to another node.
        spag_s, sprs_s: Seconds that they took on this rank.
        spag_exposed_s, sprs_exposed_s: The part of these for which this rank's compute had to wait.
        placements: Placement of the last plan. A report of several expert-parallel groups has one placement
            for each group.
        schedule: Order of collectives in the last forward pass (Parm); ``None`` if it was not recorded.
        schedule_predicted_s: Modelled seconds of every schedule in the comparison that selected ``schedule``.
        strategy: The strategy that ``auto`` selected for the layer; ``None`` under other strategies.
        forward, backward: Seconds of the forward and of the backward passes on this rank.
    """

    layer: int
    counts_DE: np.ndarray
    owner_D: np.ndarray
    device_D: np.ndarray
    by_nodes_N: np.ndarray
    by_devices_D: np.ndarray
    num_replicas: int = 0
    spag_bytes: int = 0
    sprs_bytes: int = 0
    cross_node_tokens: int = 0
    spag_s: float = 0.0
    spag_exposed_s: float = 0.0
    sprs_s: float = 0.0
    sprs_exposed_s: float = 0.0
    placements: tuple[ExpertPlacement, ...] = ()
    schedule: str | None = None
    schedule_predicted_s: dict[str, float] = field(default_factory=dict)
    strategy: str | None = None
    forward: PassSeconds = field(default_factory=PassSeconds)
    backward: PassSeconds = field(default_factory=PassSeconds)

    def add_tokens(self, placement: ExpertPlacement, device_D: np.ndarray, cross_node: int) -> None:
        """Add the pairs that devices computed, ``[D]``, and how many were dispatched to another node."""
        self.num_replicas = max(self.num_replicas, placement.num_replicas)
        self.placements = (placement,)
        self.device_D += device_D
        self.cross_node_tokens += cross_node

    def add_plain(self, counts_DE: np.ndarray, plain_owner_E: np.ndarray, spread: np.ndarray | None) -> None:
        """Add what plain expert parallelism, with these owners ``[E]``, would do for counts ``[D, E]``.

        ``spread`` has tokens by the number of nodes, then by the number of devices, int64 ``[N + D]``.
        """
        if spread is not None:
            num_nodes = len(self.by_nodes_N)
            self.by_nodes_N += spread[:num_nodes]
            self.by_devices_D += spread[num_nodes:]
        owner_D = np.bincount(plain_owner_E, weights=counts_DE.sum(axis=0), minlength=len(self.owner_D))
        self.owner_D += owner_D.astype(np.int64)

    def add(self, timer: TransferTimer) -> None:
        """Add bytes and times of a transfer; its ``wait`` must have returned."""
        busy_s, exposed_s = timer.seconds()
        if timer.is_gather:
            self.spag_bytes += timer.num_bytes
            self.spag_s += busy_s
            self.spag_exposed_s += exposed_s
        else:
            self.sprs_bytes += timer.num_bytes
            self.sprs_s += busy_s
            self.sprs_exposed_s += exposed_s

    def present_ED(self) -> np.ndarray:
        """Which devices had which experts, bool ``[E, D]``; D counts the devices of all groups in turn."""
        return self._side_by_side([placement.present_ED for placement in self.placements])

    def owned_ED(self) -> np.ndarray:
        """Which devices owned which experts, bool ``[E, D]``; D counts the devices of all groups in turn."""
        owned = [one.owner_E[:, None] == np.arange(one.num_devices) for one in self.placements]
        return self._side_by_side(owned)

    def _side_by_side(self, held_ED: list[np.ndarray]) -> np.ndarray:
        if not held_ED:  # There has been no forward pass.
            return np.zeros((self.counts_DE.shape[1], len(self.device_D)), np.bool_)
        return np.concatenate(held_ED, axis=1)

    @staticmethod
    def empty(context: LayerContext) -> "LayerLoad":
        """A load with all numbers zero, for the start of an iteration."""
        owner_D, device_D, by_devices_D = np.zeros((3, context.num_devices), np.int64)
        counts_DE = np.zeros((context.num_devices, context.num_experts), np.int64)
        by_nodes_N = np.zeros(context.topology.num_nodes, np.int64)
        return LayerLoad(context.layer, counts_DE, owner_D, device_D, by_nodes_N, by_devices_D)
