"""What one layer did in an iteration, for history and reports.

Shape legend: D devices, E experts.
"""

from dataclasses import dataclass, field

import numpy as np

from megatron_fssdp.collectives.sparse_transfer import StartedTransfer


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
        schedule: The order of collectives of the last forward pass (Parm), where one was told.
        schedule_predicted_s: Modelled seconds of those that it was compared with.
        strategy: What the layer has chosen, where it could.
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
    schedule: str | None = None
    schedule_predicted_s: dict[str, float] = field(default_factory=dict)
    strategy: str | None = None

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

    @staticmethod
    def empty(layer: int, num_devices: int, num_experts: int) -> "LayerLoad":
        """A load of nothing yet."""
        return LayerLoad(
            layer,
            np.zeros((num_devices, num_experts), np.int64),
            np.zeros(num_devices, np.int64),
            np.zeros(num_devices, np.int64),
        )
