"""Who says when an iteration of a model's layers begins and ends."""

from dataclasses import dataclass

from megatron_fssdp.runtime.replicas.materialization import Materialization


@dataclass
class IterationClock:
    """Who ends iterations, the same for all layers of a model.

    Attributes:
        driven: Whether a training loop marks them. Without one, each backward pass counts
            as an iteration, so that a layer in somebody's own loop balances as well. A loop
            with several micro-batches in flight and non-reentrant activation recompute needs
            the marks: there the plan must not change between a forward and its recomputation.
        num_micro_batches: Backward passes that the running iteration is going to have, where the
            loop says so and promises to call ``MoERuntime.finish_gradients`` before it reads
            any gradient. Weights are then gathered once an iteration and gradients reduced in
            the background. ``None``: every pass gathers, and reduces before it ends.
        iteration: The running one as the loop's log counts it, for messages; ``None`` where nobody says.
        latest: The last layer of the running forward pass whose replicas are re-materialized.
    """

    driven: bool = False
    num_micro_batches: int | None = None
    iteration: int | None = None
    latest: Materialization | None = None
