"""A cache, kept on a placement or a plan, of results that depend only on it and a topology."""

from collections.abc import Callable

from megatron_fssdp.planning.placement.topology import Topology


def kept_on[Keeper, Result](
    keeper: Keeper, topology: Topology, build: Callable[[Keeper, Topology], Result]
) -> Result:
    """Result of ``build(keeper, topology)``, cached on the keeper.

    The cache holds one result for each function ``build``. A call with another topology object replaces it.

    Args:
        keeper: The frozen object that also keeps the result, such as a placement.
        topology: Nodes of the devices.
        build: Function that computes the result.
    """
    kept: tuple[Topology, Result] | None = keeper.__dict__.get(build.__qualname__)
    if kept is None or kept[0] is not topology:
        kept = keeper.__dict__[build.__qualname__] = (topology, build(keeper, topology))
    return kept[1]
