"""For how long replicas are on a device, and how many layers' replicas that makes at once."""

from dataclasses import dataclass
from enum import Enum, auto

from megatron_fssdp.planning.memory.pipeline_stage import PipelineStage


class ReplicaLife(Enum):
    """For how long a replica is on its device."""

    LAYER_PASS = auto()
    """A layer's forward pass, and its backward pass again: released between them (Hecate §4.2)."""
    MICRO_BATCH = auto()
    """From a micro-batch's forward pass to the end of the same layer's backward pass."""
    ITERATION = auto()
    """All micro-batches of an iteration."""
    CHOSEN = auto()
    """A micro-batch in some layers, an iteration in others, and which is which may change."""
    LASTING = auto()
    """Until a strategy drops it, with a ``main_grad`` and optimizer states of its own (FlexMoE)."""

    def sums_gradients(self, num_micro_batches: int) -> bool:
        """Whether gradients are summed over the micro-batches and go home once an iteration.

        Else they go home with every micro-batch, in the parameters' dtype, and none outlives its layer.

        Args:
            num_micro_batches: Of an iteration.
        """
        return num_micro_batches > 1 and self in _SUMMING


_SUMMING = (ReplicaLife.ITERATION, ReplicaLife.CHOSEN, ReplicaLife.LASTING)


@dataclass(frozen=True)
class HeldReplicas:
    """When replicas are on a rank: what their number of bytes follows from.

    Attributes:
        life: Of a replica.
        stage: The layers, and the order of their passes.
        num_micro_batches: Of an iteration; the most that are to come, if that changes.
    """

    life: ReplicaLife
    stage: PipelineStage
    num_micro_batches: int = 1

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1:
            raise ValueError(f"num_micro_batches is {self.num_micro_batches}: wanted 1 or more")

    @property
    def num_layers(self) -> int:
        """MoE layers of the stage, L."""
        return self.stage.num_layers

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed over the micro-batches and go home once an iteration."""
        return self.life.sums_gradients(self.num_micro_batches)

    @property
    def sends_fp32(self) -> bool:
        """Whether gradients travel in fp32: sums of several micro-batches, and those of resident replicas."""
        return self.sums_gradients or self.life is ReplicaLife.LASTING

    @property
    def layers_with_weights(self) -> int:
        """Layers whose replicas' weights are there at once, most.

        A replica that lives for a micro-batch counts once for every one that waits for its backward
        pass. An upper bound: where layers are recomputed, only the backward pass that runs has any. Where
        life is chosen layer by layer, no choice holds more than a micro-batch's in all of them.
        """
        if self.life is ReplicaLife.LAYER_PASS:
            return min(self.num_layers, 1)
        if self.life in (ReplicaLife.MICRO_BATCH, ReplicaLife.CHOSEN):
            return self.stage.layers_in_flight(self.num_micro_batches)
        return self.num_layers

    @property
    def layers_with_sums(self) -> int:
        """Layers whose replicas' gradients wait in sums of our own for the last micro-batch."""
        # Lasting replicas have main_grad for that.
        return self.num_layers if self.sums_gradients and self.life is not ReplicaLife.LASTING else 0
