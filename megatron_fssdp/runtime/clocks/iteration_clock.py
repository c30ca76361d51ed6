"""The clock of iterations that all layers of a model share."""

from dataclasses import dataclass

from megatron_fssdp.runtime.replicas.materialization import Materialization


@dataclass
class IterationClock:
    """State of the running iteration, shared by all layers of a model.

    Attributes:
        driven: Whether a training loop marks iterations. Otherwise, each backward pass counts as an
            iteration, so that a layer in a user's own loop is balanced as well. A loop with several
            micro-batches in flight and non-reentrant activation recompute must mark iterations, because the
            plan must not change between a forward pass and its recomputation.
        num_micro_batches: Number of backward passes in the running iteration, if the loop tells it and calls
            ``MoERuntime.finish_gradients`` before it reads any gradient. Weights are then gathered once in an
            iteration and gradients are reduced in the background. With ``None``, every forward pass gathers,
            and every backward pass reduces before it ends.
        iteration: Number of the running iteration in the loop's log, for messages; ``None`` if unknown.
        latest: Materialization of the last re-materialized layer that the running forward pass has reached.
    """

    driven: bool = False
    num_micro_batches: int | None = None
    iteration: int | None = None
    latest: Materialization | None = None
