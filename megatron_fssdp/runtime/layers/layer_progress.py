"""How far a layer has come in an iteration."""

from collections import deque
from dataclasses import dataclass, field

from megatron_fssdp.runtime.layers.slot_pass import SlotPass
from megatron_fssdp.runtime.slots.resident_gradients import ResidentGradients


@dataclass(eq=False)
class LayerProgress:
    """State of one layer in an iteration; a new iteration begins with a new one.

    Attributes:
        is_reduced: Whether the gradient sums of the iteration have been sent home.
        is_home: Whether no gradient of a replica is missing at its owner.
        is_final: Whether the strategy has seen the exact counts of the first micro-batch.
        num_backward: Number of backward passes whose gradients are complete.
        num_computed: Number of backward passes whose weight gradients are computed, but whose dispatch is not
            over.
        over: Passes whose backward dispatch is over, but whose weight gradients are not computed.
        own: Passes that belong to one micro-batch each, and are not over.
        residents: All-reduce of the resident replicas' gradients; ``None`` before the last backward pass.
    """

    is_reduced: bool = False
    is_home: bool = True
    is_final: bool = False
    num_backward: int = 0
    num_computed: int = 0
    over: deque[SlotPass] = field(default_factory=deque)
    own: list[SlotPass] = field(default_factory=list)
    residents: ResidentGradients | None = None
