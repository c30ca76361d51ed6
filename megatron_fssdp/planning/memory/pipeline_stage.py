"""How many forward passes wait for their backward pass on one stage of a pipeline.

Shape letters: C model chunks of a stage, P passes of a stage in an iteration, one for each micro-batch
and chunk.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PipelineStage:
    """One rank's part of a pipeline, in the order in which Megatron's schedules run it (1F1B).

    Attributes:
        layers_of_chunk: MoE layers of each of the stage's model chunks; several chunks are interleaved.
        num_stages: Pipeline-parallel ranks; 1 without pipelining.
        stage: This one, from 0.
        group_size: Micro-batches that a chunk runs one after another before the next chunk has its turn
            (``--microbatch-group-size-per-virtual-pipeline-stage``); ``None`` for Megatron's default,
            as many as there are stages.
    """

    layers_of_chunk: tuple[int, ...]
    num_stages: int = 1
    stage: int = 0
    group_size: int | None = None

    def __post_init__(self) -> None:
        if not self.layers_of_chunk or min(self.layers_of_chunk) < 0:
            raise ValueError(
                f"layers_of_chunk is {self.layers_of_chunk}: wanted one chunk or more, 0 or more each"
            )
        if not 0 <= self.stage < self.num_stages:
            raise ValueError(
                f"stage is {self.stage}: wanted 0 or more, and less than the {self.num_stages} stages"
            )
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}: wanted 1 or more")

    @property
    def num_layers(self) -> int:
        """MoE layers of the stage, L."""
        return sum(self.layers_of_chunk)

    def layers_in_flight(self, num_micro_batches: int) -> int:
        """Most layers that have run forward and not yet backward, counted once for every micro-batch.

        Without pipelining those of one micro-batch; without chunks those of
        ``min(num_micro_batches, num_stages - stage)``.

        Args:
            num_micro_batches: Of an iteration.
        """
        layers_C = np.array(self.layers_of_chunk)
        chunk_P = self._chunks_forward(num_micro_batches)
        forward_P = layers_C[chunk_P].cumsum()
        # A backward pass goes through the chunks from the last one to the first.
        backward_P = layers_C[::-1][chunk_P].cumsum()
        # After the first passes, each forward pass has a backward pass behind it.
        num_first = min(self._num_warmup, len(chunk_P) - 1)
        done = np.concatenate([[0], backward_P[: len(chunk_P) - num_first - 1]])
        return int((forward_P[num_first:] - done).max())

    @property
    def _num_warmup(self) -> int:
        """Forward passes before the first one that a backward pass follows (``get_pp_rank_microbatches``)."""
        behind, num_chunks = self.num_stages - self.stage - 1, len(self.layers_of_chunk)
        return behind if num_chunks == 1 else 2 * behind + (num_chunks - 1) * self._group

    def _chunks_forward(self, num_micro_batches: int) -> np.ndarray:
        """The chunk of each forward pass in turn (``get_schedule_table``)."""
        chunks_C = np.arange(len(self.layers_of_chunk))
        starts = range(0, num_micro_batches, self._group)
        return np.concatenate(
            [np.repeat(chunks_C, min(self._group, num_micro_batches - start)) for start in starts]
        )

    @property
    def _group(self) -> int:
        return self.group_size or self.num_stages
