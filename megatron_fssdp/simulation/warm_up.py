"""Number of iterations before a strategy is in its steady state."""

from megatron_fssdp.strategies.strategy import MovesOwners, ResidentReplicas, SelectsStrategies, Strategy


def warm_up_iterations(strategy: Strategy, num_iterations: int) -> int:
    """Return the number of first iterations in which a strategy cannot decide as it does later.

    A strategy that needs measured costs waits for its profile. A strategy that plans from past loads has none
    in the first iteration. A strategy that acts only at an interval (resident replicas, owners without
    replicas, the selection of ``auto``) waits for its first turn. Plain expert parallelism has no warm-up.

    Args:
        strategy: A new strategy object, as :func:`replay_strategy` gets it.
        num_iterations: Number of iterations of the simulation.

    Returns:
        The number of warm-up iterations; ``num_iterations`` if the strategy never gets beyond them.
    """
    replicates = strategy.may_replicate(1)
    first = max(strategy.profile_iterations, int(replicates or strategy.moves_owners or strategy.selects))
    turns = range(first, num_iterations)
    if isinstance(strategy, SelectsStrategies):
        return next((i for i in turns if strategy.selects_at(i, i)), num_iterations)
    if isinstance(strategy, ResidentReplicas):
        return next((i for i in turns if strategy.replicates_at(i)), num_iterations)
    if isinstance(strategy, MovesOwners) and strategy.moves_owners and not replicates:
        return next((i for i in turns if strategy.reshards_at(i)), num_iterations)
    return min(first, num_iterations)
