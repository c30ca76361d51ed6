"""How many forward passes wait for their backward pass on one pipeline stage.

Shape letters: V model chunks of a pipeline stage.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PipelineStage:
    """One rank's pipeline stage, with the order of passes of Megatron's schedules (1F1B).

    Attributes:
        layers_of_chunk: Number of MoE layers in each of the stage's model chunks. Several chunks mean an
            interleaved pipeline.
        num_stages: Number of pipeline stages; 1 without pipelining.
        stage: Number of this stage, from 0.
        group_size: Number of micro-batches that a chunk runs one after another before the next chunk starts
            (``--microbatch-group-size-per-virtual-pipeline-stage``). ``None`` is Megatron's default: the
            number of stages.

    Raises:
        ValueError: A number is out of range.
    """

    layers_of_chunk: tuple[int, ...]
    num_stages: int = 1
    stage: int = 0
    group_size: int | None = None

    def __post_init__(self) -> None:
        if not self.layers_of_chunk or min(self.layers_of_chunk) < 0:
            raise ValueError(
                f"layers_of_chunk is {self.layers_of_chunk}: wanted at least one chunk, and 0 or more layers "
                "in each"
            )
        if not 0 <= self.stage < self.num_stages:
            raise ValueError(
                f"stage is {self.stage}: wanted 0 or more, and less than the {self.num_stages} stages"
            )
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}: wanted 1 or more")

    @property
    def num_layers(self) -> int:
        """Number of MoE layers of the pipeline stage, L."""
        return sum(self.layers_of_chunk)

    def layers_in_flight(self, num_micro_batches: int) -> int:
        """Largest number of (layer, micro-batch) pairs that have run forward and not yet backward.

        Without pipelining, these are the layers of one micro-batch. With one model chunk, they are the layers
        of ``min(num_micro_batches, num_stages - stage)`` micro-batches.

        Args:
            num_micro_batches: Number of micro-batches in an iteration.
        """
        layers_V = np.array(self.layers_of_chunk)
        chunk_of_pass = self._chunks_forward(num_micro_batches)
        layers_forward = layers_V[chunk_of_pass].cumsum()
        # A backward pass goes through the chunks from the last one to the first.
        layers_backward = layers_V[::-1][chunk_of_pass].cumsum()
        # After the warm-up passes, each forward pass is followed by a backward pass.
        num_first = min(self._num_warmup, len(chunk_of_pass) - 1)
        done = np.concatenate([[0], layers_backward[: len(chunk_of_pass) - num_first - 1]])
        return int((layers_forward[num_first:] - done).max())

    @property
    def _num_warmup(self) -> int:
        """Number of warm-up passes: forward passes before the first pair of forward and backward pass.

        It follows Megatron's ``get_pp_rank_microbatches``.
        """
        behind, num_chunks = self.num_stages - self.stage - 1, len(self.layers_of_chunk)
        return behind if num_chunks == 1 else 2 * behind + (num_chunks - 1) * self._group

    def _chunks_forward(self, num_micro_batches: int) -> np.ndarray:
        """Model chunk of each forward pass in turn, int64 (Megatron's ``get_schedule_table``).

        The array has one entry for each chunk and micro-batch.
        """
        chunks_V = np.arange(len(self.layers_of_chunk))
        starts = range(0, num_micro_batches, self._group)
        return np.concatenate(
            [np.repeat(chunks_V, min(self._group, num_micro_batches - start)) for start in starts]
        )

    @property
    def _group(self) -> int:
        """Number of micro-batches that a chunk runs one after another."""
        return self.group_size or self.num_stages
