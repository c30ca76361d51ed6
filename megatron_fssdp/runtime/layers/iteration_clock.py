"""The clock of iterations that all layers of a model share."""

from dataclasses import dataclass


@dataclass
class IterationClock:
    """State of the running iteration, shared by all layers of a model.

    Attributes:
        driven: Whether the passes belong to an iteration that a loop has marked. Otherwise each forward pass
            is planned alone, gathers its replicas, and sends their gradients home before its backward pass
            ends, so that a layer in a user's own loop is balanced as well.
        num_micro_batches: Number of backward passes in the running iteration; 0 outside of an iteration and
            in an evaluation.
        iteration: Number of the running iteration in the loop's log, for messages; ``None`` if unknown.
    """

    driven: bool = False
    num_micro_batches: int = 0
    iteration: int | None = None
