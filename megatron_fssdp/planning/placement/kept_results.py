"""What follows from a placement and a topology alone, computed once and kept on the placement."""

from collections.abc import Callable

from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology


def kept_on[Result](
    placement: ExpertPlacement, topology: Topology, build: Callable[[ExpertPlacement, Topology], Result]
) -> Result:
    """What ``build`` makes of the two, kept for as long as the same topology asks."""
    kept: tuple[Topology, Result] | None = placement.__dict__.get(build.__qualname__)
    if kept is None or kept[0] is not topology:
        kept = placement.__dict__[build.__qualname__] = (topology, build(placement, topology))
    return kept[1]
