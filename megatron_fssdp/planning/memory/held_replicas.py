"""How long replicas stay on a device, and for how many layers a device holds replicas at the same time."""

from dataclasses import dataclass
from enum import Enum, auto

from megatron_fssdp.planning.memory.pipeline_stage import PipelineStage


class ReplicaLife(Enum):
    """How long a replica stays on its device."""

    LAYER_PASS = auto()
    """For one pass of a layer.

    The replica is released after the forward pass and gathered again for the backward pass (Hecate §4.2,
    re-materialization).
    """
    MICRO_BATCH = auto()
    """For one micro-batch: from the layer's forward pass to the end of its backward pass."""
    ITERATION = auto()
    """For all micro-batches of an iteration."""
    SELECTED = auto()
    """As long as under the strategy that ``auto`` selects for the layer: a micro-batch or an iteration."""
    RESIDENT = auto()
    """Until the strategy drops the replica.

    Such a resident replica has a ``main_grad`` and optimizer states of its own (FlexMoE).
    """

    def sums_gradients(self, num_micro_batches: int) -> bool:
        """Whether replicas sum gradients over micro-batches and send them to the owners once an iteration.

        Otherwise each micro-batch sends its gradients to the owners, in the parameters' data type. Then no
        gradient is kept after its layer's backward pass.

        Args:
            num_micro_batches: Number of micro-batches in an iteration.
        """
        return num_micro_batches > 1 and self in _SUMMING


_SUMMING = (ReplicaLife.ITERATION, ReplicaLife.SELECTED, ReplicaLife.RESIDENT)


@dataclass(frozen=True)
class HeldReplicas:
    """How long a rank holds replicas, and of which layers. Their number of bytes follows from this.

    Attributes:
        life: How long a replica stays on its device.
        stage: The rank's pipeline stage: its layers and the order of their passes.
        num_micro_batches: Number of micro-batches in an iteration. If the number changes during training, the
            largest number that is still to come.
        fuses_gradients: Whether the matrix products of a backward pass add replicas' gradients to fp32 sums,
            as Transformer Engine's ``fuse_wgrad_accumulation`` does. Otherwise autograd makes gradients in
            the parameters' data type.

    Raises:
        ValueError: The number of micro-batches is less than 1.
    """

    life: ReplicaLife
    stage: PipelineStage
    num_micro_batches: int = 1
    fuses_gradients: bool = False

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1:
            raise ValueError(f"num_micro_batches is {self.num_micro_batches}: wanted 1 or more")

    @property
    def num_layers(self) -> int:
        """Number of MoE layers of the pipeline stage, L."""
        return self.stage.num_layers

    @property
    def sums_gradients(self) -> bool:
        """Whether replicas sum gradients over micro-batches and send them to the owners once an iteration."""
        return self.life.sums_gradients(self.num_micro_batches)

    @property
    def sends_fp32(self) -> bool:
        """Whether gradients are sent in fp32.

        Sums over several micro-batches are, and so are the gradients of resident replicas.
        """
        return self.sums_gradients or self.life is ReplicaLife.RESIDENT

    @property
    def layers_with_weights(self) -> int:
        """Largest number of layers whose replicas' weights are on the device at the same time.

        If replicas live for a micro-batch, a layer counts once for each micro-batch that waits for its
        backward pass. The number is an upper bound: if layers are recomputed, only the layer whose backward
        pass is running holds such replicas. If each layer has its own life of replicas, most memory is used
        when replicas of all layers live for a micro-batch.
        """
        if self.life is ReplicaLife.LAYER_PASS:
            return min(self.num_layers, 1)
        if self.life in (ReplicaLife.MICRO_BATCH, ReplicaLife.SELECTED):
            return self.stage.layers_in_flight(self.num_micro_batches)
        return self.num_layers

    @property
    def layers_with_sums(self) -> int:
        """Number of layers whose replicas' gradients are kept in extra sums until the last micro-batch."""
        # Resident replicas need no extra sums, because they sum gradients in their main_grad.
        return self.num_layers if self.sums_gradients and self.life is not ReplicaLife.RESIDENT else 0
