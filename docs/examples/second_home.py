"""A strategy in one file: the hottest expert of a layer's busiest device gets a second home.

Shape letters: D devices, E experts.
"""

import numpy as np
from pydantic import Field

from megatron_fssdp.config.strategy_settings import ScheduleSettings
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan, Strategy


class SecondHomeSettings(ScheduleSettings):
    """Keys of ``second_home``."""

    threshold: float = Field(
        default=1.2, ge=1, description="Maximum over mean device load above which an expert is replicated."
    )


class SecondHome(Strategy[SecondHomeSettings]):
    """``second_home``: one replica a layer and iteration, on the least loaded device."""

    def slots(self, context: LayerContext) -> int:
        """Memory for one replica is accounted for."""
        return 1

    def limits(self, context: LayerContext) -> str:
        """For the log."""
        return f"one replica a layer, above max/mean {self.settings.threshold}"

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """The hottest expert of the device that was busiest in the last iteration also goes to the idlest."""
        load_E = history.mean_E()
        load_D = np.bincount(context.owner_E, weights=load_E, minlength=context.num_devices)
        if load_D.max() <= self.settings.threshold * load_D.mean():  # also where nothing was seen yet
            return LayerPlan.owners_only(context)
        # Of equals, argmax and argmin take the lowest index: all ranks decide alike.
        busiest, idlest = load_D.argmax(), load_D.argmin()
        hottest = np.where(context.owner_E == busiest, load_E, -1).argmax()
        present_ED = context.placement.present_ED.copy()
        present_ED[hottest, idlest] = True
        placement = ExpertPlacement(context.owner_E, present_ED)
        return LayerPlan(placement, two_level_transfer(placement, context.topology))
