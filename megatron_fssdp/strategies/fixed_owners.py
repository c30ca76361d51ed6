"""What strategies have in common that leave every expert with its first owner."""

from collections.abc import Sequence

import numpy as np

from megatron_fssdp.planning.owner_map import OwnerMap
from megatron_fssdp.strategies.strategy import LayerContext


class FixedOwners:
    """Nothing is re-sharded, and every layer can be served."""

    def check(self, context: LayerContext) -> None:
        """Nothing to refuse."""

    def reshards_at(self, iteration: int) -> bool:
        """Never."""
        return False

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """The owners as they are."""
        return owners
