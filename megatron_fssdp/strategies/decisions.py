"""What a strategy moves between two iterations: owners of experts, or else resident replicas.

Trainings, the simulator and the testbed ask here, and carry it out in their ways.

Shape letters: L MoE layers, D devices, E experts.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.strategy import MovesOwners, ResidentReplicas, Strategy, mistakes_named


class StageLoads(NamedTuple):
    """The layers of a pipeline stage, and the sums of their latest loads, float or int64 ``[L, D, E]``.

    The sums are over ``num_iterations`` of all ranks with copies of the same experts.
    """

    contexts: Sequence[LayerContext]
    total_LDE: np.ndarray
    num_iterations: int

    @classmethod
    def of(cls, contexts: Sequence[LayerContext], histories: Sequence[LoadHistory]) -> "StageLoads":
        """The loads of layers whose experts have no copies."""
        total_LDE = np.stack([history.total_DE() for history in histories])
        return cls(contexts, total_LDE, max(len(histories[0]), 1))


def moved_before(
    strategy: Strategy, iteration: int, loads: Callable[[], StageLoads], owners: OwnerMap
) -> OwnerMap | list[ExpertPlacement] | None:
    """New owners, or placements of resident replicas, after ``iteration`` complete iterations.

    ``None`` if it is not the turn of either; ``loads`` are asked for in turn only.

    Raises:
        ConfigurationError: A strategy of another package failed.
    """
    if isinstance(strategy, MovesOwners) and strategy.moves_owners and strategy.reshards_at(iteration):
        contexts, total_LDE, num_iterations = loads()
        with mistakes_named(strategy, "reshard"):
            return strategy.reshard(contexts, total_LDE.sum(axis=1) / num_iterations, owners)
    if isinstance(strategy, ResidentReplicas) and strategy.replicates_at(iteration):
        contexts, total_LDE, num_iterations = loads()
        with mistakes_named(strategy, "replicate"):
            mean_LDE = total_LDE / num_iterations
            return [strategy.replicate(*layer) for layer in zip(contexts, mean_LDE, strict=True)]
    return None
