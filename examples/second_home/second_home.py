"""A strategy in one file: the hottest expert of a layer's busiest device gets a second home.

At an interval of its own, the hottest expert of the busiest device also swaps owners with the coldest expert
of the idlest device.

Shape letters: D devices, E experts.
"""

import numpy as np
from pydantic import Field

import megatron_fssdp
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.strategy import MovesOwners


class SecondHomeSettings(PlacementSettings):
    """Keys of ``second_home``."""

    threshold: float = Field(
        default=1.2, ge=1, description="Maximum over mean device load above which an expert is replicated."
    )
    swap_every: int = Field(
        default=20, ge=0, description="Iterations between two swaps of owners; 0 keeps all owners."
    )


class SecondHome(MovesOwners[SecondHomeSettings]):
    """``second_home``: one replica per layer and iteration, on the least loaded device."""

    overlaps = True  # replicas travel beside the compute before the layer (this is the default)

    def __init__(self, settings: SecondHomeSettings) -> None:
        super().__init__(settings)
        self.moves_owners = settings.swap_every > 0

    def slots(self, context: LayerContext) -> int:
        """Memory for one replica is accounted for."""
        return 1

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """The hottest expert of the device that was busiest in the last iteration also goes to the idlest."""
        load_E = history.mean_E()
        busiest, idlest, is_uneven = self._extremes(context, load_E)
        if not is_uneven:
            return LayerPlan.owners_only(context)
        hottest = np.where(context.owner_E == busiest, load_E, -1).argmax()
        present_ED = context.placement.present_ED.copy()
        present_ED[hottest, idlest] = True
        placement = ExpertPlacement(context.owner_E, present_ED)
        return LayerPlan(placement, two_level_transfer(placement, context.topology), gather_ahead=True)

    def reshards_at(self, iteration: int) -> bool:
        """Every ``swap_every`` iterations."""
        return self.moves_owners and iteration > 0 and iteration % self.settings.swap_every == 0

    def reshard_layer(self, context: LayerContext, load_E: np.ndarray) -> np.ndarray:
        """The busiest device's hottest expert and the idlest device's coldest one swap their owners."""
        busiest, idlest, is_uneven = self._extremes(context, load_E)
        owner_E = context.owner_E.copy()
        if is_uneven:
            hottest = np.where(context.owner_E == busiest, load_E, -1).argmax()
            coldest = np.where(context.owner_E == idlest, load_E, np.inf).argmin()
            owner_E[hottest], owner_E[coldest] = idlest, busiest
        return owner_E

    def _extremes(self, context: LayerContext, load_E: np.ndarray) -> tuple[int, int, bool]:
        """Busiest device, idlest device, and whether the loads are uneven enough to act."""
        load_D = np.bincount(context.owner_E, weights=load_E, minlength=context.num_devices)
        # Of equals, argmax and argmin take the lowest index: all ranks decide alike.
        is_uneven = bool(load_D.max() > self.settings.threshold * load_D.mean())
        return int(load_D.argmax()), int(load_D.argmin()), is_uneven


def register() -> None:
    """Entry point of the group ``megatron_fssdp.strategies``."""
    megatron_fssdp.register_strategy(
        "second_home",
        settings=SecondHomeSettings,
        strategy=SecondHome,
        summary="the hottest expert of the busiest device also lives on the idlest",
        colour="#332288",
        candidate=True,
    )
