"""A cache, kept on a placement, of results that depend only on the placement and a topology."""

from collections.abc import Callable

from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology


def kept_on[Result](
    placement: ExpertPlacement, topology: Topology, build: Callable[[ExpertPlacement, Topology], Result]
) -> Result:
    """Result of ``build(placement, topology)``, cached on the placement.

    The cache holds one result for each function ``build``. A call with another topology object replaces it.

    Args:
        placement: The placement that also keeps the result.
        topology: Nodes of the devices.
        build: Function that computes the result.
    """
    kept: tuple[Topology, Result] | None = placement.__dict__.get(build.__qualname__)
    if kept is None or kept[0] is not topology:
        kept = placement.__dict__[build.__qualname__] = (topology, build(placement, topology))
    return kept[1]
