"""What one layer did in an iteration, for history and reports.

Shape letters: D devices, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_fssdp.collectives.sparse.sparse_transfer import StartedTransfer
from megatron_fssdp.planning.dispatch.token_dispatch import TokenDispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement


@dataclass
class LayerLoad:
    """What one layer did in one iteration, summed over its micro-batches and all its devices.

    Attributes:
        layer: Megatron's layer number.
        counts_DE: int64 (token, k) pairs by source device and expert.
        owner_D: int64 pairs each device would compute under plain expert parallelism.
        device_D: int64 pairs each device computed under the placement used.
        num_replicas: Replicas in the last plan.
        spag_bytes: Bytes that SparseAllGather moved between devices.
        sprs_bytes: Bytes that SparseReduceScatter moved between devices.
        cross_node_tokens: Pairs dispatched to another node.
        spag_s: Seconds that this rank's part in SparseAllGather took.
        spag_exposed_s: Of these, the ones that its compute had to wait for.
        sprs_s: The same for SparseReduceScatter.
        sprs_exposed_s: The same for SparseReduceScatter.
        placements: Of the last plan; one of each expert-parallel group where several are put side by side.
        schedule: The order of collectives of the last forward pass (Parm), where one was told.
        schedule_predicted_s: Modelled seconds of those that it was compared with.
        strategy: The strategy that ``auto`` selected for the layer; ``None`` under other strategies.
    """

    layer: int
    counts_DE: np.ndarray
    owner_D: np.ndarray
    device_D: np.ndarray
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

    def measure(
        self, counts_DE: np.ndarray, dispatch_of_peer: Sequence[TokenDispatch], plain_owner_E: np.ndarray
    ) -> None:
        """Count where a micro-batch's tokens went, and where they would have gone.

        Args:
            counts_DE: The micro-batch's.
            dispatch_of_peer: Of each expert-tensor-parallel peer.
            plain_owner_E: Owners under plain expert parallelism.
        """
        for dispatch in dispatch_of_peer:
            self.device_D += dispatch.device_tokens_D()
            self.cross_node_tokens += dispatch.cross_node_tokens()
        counts_E = counts_DE.sum(axis=0)
        owner_D = np.bincount(plain_owner_E, weights=counts_E, minlength=len(self.owner_D))
        self.owner_D += owner_D.astype(np.int64)

    def add(self, started: StartedTransfer) -> None:
        """Count a transfer that has been waited for."""
        timing = started.timer.timing()
        if started.is_gather:
            self.spag_bytes += started.num_bytes
            self.spag_s += timing.busy_s
            self.spag_exposed_s += timing.exposed_s
        else:
            self.sprs_bytes += started.num_bytes
            self.sprs_s += timing.busy_s
            self.sprs_exposed_s += timing.exposed_s

    def present_ED(self) -> np.ndarray:
        """bool: which devices had which experts, the groups' devices side by side."""
        return self._side_by_side([placement.present_ED for placement in self.placements])

    def owned_ED(self) -> np.ndarray:
        """bool: which devices owned which experts, the groups' devices side by side."""
        devices = [np.arange(placement.num_devices) for placement in self.placements]
        return self._side_by_side(
            [
                placement.owner_E[:, None] == device_D
                for placement, device_D in zip(self.placements, devices, strict=True)
            ]
        )

    def _side_by_side(self, held_ED: list[np.ndarray]) -> np.ndarray:
        if not held_ED:  # no forward pass yet
            return np.zeros((self.counts_DE.shape[1], len(self.device_D)), np.bool_)
        return np.concatenate(held_ED, axis=1)

    @staticmethod
    def empty(layer: int, num_devices: int, num_experts: int) -> "LayerLoad":
        """A load of nothing yet."""
        return LayerLoad(
            layer,
            np.zeros((num_devices, num_experts), np.int64),
            np.zeros(num_devices, np.int64),
            np.zeros(num_devices, np.int64),
        )
