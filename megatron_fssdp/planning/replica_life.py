"""How long replicas stay on a device, and for how many layers a device holds replicas at the same time.

Shape letters: V model chunks of a pipeline stage.
"""

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np


class ReplicaLife(Enum):
    """How long a replica stays on its device."""

    LAYER_PASS = auto()
    """For one pass of a layer; the backward pass gathers it again (Hecate §4.2, re-materialization)."""
    MICRO_BATCH = auto()
    """For one micro-batch: from the layer's forward pass to the end of its backward pass."""
    ITERATION = auto()
    """For all micro-batches of an iteration."""
    SELECTED = auto()
    """As long as under the strategy that ``auto`` selects for the layer: a micro-batch or an iteration."""
    RESIDENT = auto()
    """Until the strategy drops it. It has a ``main_grad`` and optimizer states of its own (FlexMoE)."""

    def sums_gradients(self, num_micro_batches: int) -> bool:
        """Whether replicas sum gradients over micro-batches and send them once an iteration."""
        return num_micro_batches > 1 and self not in (ReplicaLife.LAYER_PASS, ReplicaLife.MICRO_BATCH)


@dataclass(frozen=True)
class PipelineStage:
    """One rank's pipeline stage, with the order of passes of Megatron's schedules (1F1B).

    Attributes:
        layers_of_chunk: Number of MoE layers in each of the stage's model chunks; several if interleaved.
        num_stages: Number of pipeline stages; 1 without pipelining. ``stage`` counts from 0.
        group_size: Micro-batches that a chunk runs before the next chunk starts
            (``--microbatch-group-size-per-virtual-pipeline-stage``); ``None`` means the number of stages.
    """

    layers_of_chunk: tuple[int, ...]
    num_stages: int = 1
    stage: int = 0
    group_size: int | None = None

    @property
    def num_layers(self) -> int:
        """Number of MoE layers of the pipeline stage, L."""
        return sum(self.layers_of_chunk)

    def layers_in_flight(self, num_micro_batches: int) -> int:
        """Largest number of (layer, micro-batch) pairs that have run forward and not yet backward."""
        # The order of passes is that of Megatron's get_schedule_table and get_pp_rank_microbatches.
        layers_V, group = np.array(self.layers_of_chunk), self.group_size or self.num_stages
        starts = range(0, num_micro_batches, group)
        chunk_of_pass = np.concatenate(
            [np.repeat(np.arange(len(layers_V)), min(group, num_micro_batches - start)) for start in starts]
        )
        layers_forward = layers_V[chunk_of_pass].cumsum()
        # A backward pass goes through the chunks from the last one to the first.
        layers_backward = layers_V[::-1][chunk_of_pass].cumsum()
        behind, num_chunks = self.num_stages - self.stage - 1, len(layers_V)
        num_warmup = behind if num_chunks == 1 else 2 * behind + (num_chunks - 1) * group
        # After the warm-up passes, each forward pass is followed by a backward pass.
        num_first = min(num_warmup, len(chunk_of_pass) - 1)
        done = np.concatenate([[0], layers_backward[: len(chunk_of_pass) - num_first - 1]])
        return int((layers_forward[num_first:] - done).max())
