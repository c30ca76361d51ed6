"""Loads, bytes and times of one layer in an iteration, for the load history and for reports.

Shape letters: D devices, E experts, N nodes, Z micro-batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron_fssdp.collectives.transfer_lanes import TransferTimer
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.clocks.pass_timer import PassSeconds, PassTimer
from megatron_fssdp.strategies.layer_plan import LayerContext


@dataclass
class LayerLoad:
    """What one layer did in one iteration, summed over its micro-batches and all its devices.

    A pair is a token together with one of its selected experts. Arrays are int64.
    """

    layer: int  # Megatron's number
    counts_DE: np.ndarray  # pairs by source device and expert
    owner_D: np.ndarray  # pairs that each device would compute under plain expert parallelism
    device_D: np.ndarray  # pairs that each device computed under the placement in use
    by_nodes_N: np.ndarray  # tokens whose experts, under plain expert parallelism, are on 1, 2, … N nodes
    by_devices_D: np.ndarray  # likewise for devices
    micro_batches: list[Callable[[], np.ndarray]] = field(default_factory=list)  # give counts, int64 [D, E]
    are_sums: bool = False  # They are means of several passes, or a sum of all.
    counts_ZDE: np.ndarray | None = None  # those of single micro-batches, int32, if they are recorded
    num_replicas: int = 0  # of the plan with most of them, as micro-batches may have plans of their own
    spag_bytes: int = 0  # that SparseAllGather moved between devices
    sprs_bytes: int = 0  # that SparseReduceScatter moved
    cross_node_tokens: int = 0  # pairs that were dispatched to another node
    spag_s: float = 0.0  # on this rank
    spag_exposed_s: float = 0.0  # the part of these beside which this rank did not compute
    sprs_s: float = 0.0
    sprs_exposed_s: float = 0.0
    placements: tuple[ExpertPlacement, ...] = ()  # of the last plan; reports have one for each group
    schedule: str | None = None  # order of collectives in the last forward pass (Parm), if recorded
    schedule_predicted_s: dict[str, float] = field(default_factory=dict)  # of all that were compared
    strategy: str | None = None  # that ``auto`` selected
    forward: PassSeconds = field(default_factory=PassSeconds)  # on this rank
    backward: PassSeconds = field(default_factory=PassSeconds)

    def single_counts(self) -> np.ndarray | None:
        """Counts of single micro-batches, int32 ``[Z, D, E]``, or ``None`` if only sums are known."""
        if self.are_sums:
            return None
        counts = [counts() for counts in self.micro_batches]
        return np.array(counts, np.int32).reshape(-1, *self.counts_DE.shape)

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

    def take(self, journal: list[TransferTimer], timer: PassTimer, *, in_steps: bool) -> None:
        """Add transfers whose ``wait`` has returned, and clear the journal. The timer has measured passes."""
        for transfer in journal:
            # In steps, a dispatch contains the experts.
            dispatches = (self.forward, self.backward) if transfer.is_gather and not in_steps else ()
            beside_s = sum(timer.take_from_dispatch(passes, transfer) for passes in dispatches)
            busy_s, exposed_s = transfer.seconds(beside_s)
            if transfer.is_gather:
                self.spag_bytes += transfer.num_bytes
                self.spag_s += busy_s
                self.spag_exposed_s += exposed_s
            else:
                self.sprs_bytes += transfer.num_bytes
                self.sprs_s += busy_s
                self.sprs_exposed_s += exposed_s
        journal.clear()

    def present_ED(self) -> np.ndarray:
        """Which devices had which experts, bool ``[E, D]``; D counts the devices of all groups in turn."""
        return self._side_by_side([placement.present_ED for placement in self.placements])

    def owned_ED(self) -> np.ndarray:
        """Which devices owned which experts, bool ``[E, D]``; D counts the devices of all groups in turn."""
        owned = [of.owner_E[:, None] == np.arange(of.num_devices) for of in self.placements]
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
