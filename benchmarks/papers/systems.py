"""Systems that papers describe and that users cannot select, registered as strategies for benchmarks."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES, register_strategy
from megatron_fssdp.config.strategy.strategy_settings import FasterMoEKeys
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.strategies.flexmoe import FlexmoeSettings
from megatron_fssdp.strategies.flexmoe.flexmoe_strategy import FlexmoeStrategy
from megatron_fssdp.strategies.fssdp import FssdpSettings
from megatron_fssdp.strategies.fssdp.fssdp_strategy import FssdpStrategy
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.smartmoe import SmartmoeSettings
from megatron_fssdp.strategies.smartmoe.smartmoe_strategy import SmartmoeStrategy, permuted_owners

MOVING_SMARTMOE, MOVING_FLEXMOE = "moving_smartmoe", "moving_flexmoe"
TOP_EXPERTS, STEPPED_HECATE = "top_experts", "stepped_hecate"


class MovingSmartmoeSettings(SmartmoeSettings):
    """Keys of ``moving_smartmoe``."""

    moves_must_pay: bool = False


class MovingFlexmoeSettings(FlexmoeSettings):
    """Keys of ``moving_flexmoe``."""

    moves_must_pay: bool = False


class TopExpertsSettings(FssdpSettings):
    """Keys of ``top_experts``."""


class SteppedHecateSettings(FssdpSettings, FasterMoEKeys):
    """Keys of ``stepped_hecate``: ``fssdp`` with FasterMoE's smart schedule."""


class MovingSmartmoe(SmartmoeStrategy):
    """SmartMoE as Hecate (§2.3) describes it: owners are exchanged at every interval, whatever that costs."""

    def reshard_layer(self, context: LayerContext, load_E: np.ndarray) -> np.ndarray:
        """New owners, once costs are known."""
        is_measured = context.profile is not None and context.num_experts >= context.num_devices
        if self.settings.moves_must_pay or not is_measured or not load_E.any():  # type: ignore[attr-defined]
            return super().reshard_layer(context, load_E)
        return permuted_owners(context.owner_E, load_E, context.num_devices)


class MovingFlexmoe(FlexmoeStrategy):
    """FlexMoE as Hecate (§2.3) describes it: a change only has to make an iteration faster."""

    def moving_s(self, context: LayerContext, before: ExpertPlacement, after: ExpertPlacement) -> float:
        """Seconds of a move, which count only if the settings say so."""
        must_pay = self.settings.moves_must_pay  # type: ignore[attr-defined]
        return super().moving_s(context, before, after) if must_pay else 0.0


class TopExperts(FssdpStrategy):
    """The last iteration's most loaded experts on all devices: Hecate's Alg. 1 with a window of one."""

    def __init__(self, settings: FssdpSettings) -> None:
        super().__init__(settings)
        self.window, self.profile_iterations = 1, 0

    def asks_after_gate(self, layer: int) -> bool:
        """False: there is no calibration."""
        return False

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """The plan itself."""
        return plan


@contextmanager
def described_systems() -> Iterator[None]:
    """Strategies that the block can name; other code never sees them."""
    systems = (
        (MOVING_SMARTMOE, MovingSmartmoeSettings, MovingSmartmoe),
        (MOVING_FLEXMOE, MovingFlexmoeSettings, MovingFlexmoe),
        (TOP_EXPERTS, TopExpertsSettings, TopExperts),
        (STEPPED_HECATE, SteppedHecateSettings, FssdpStrategy),
    )
    for name, settings, strategy in systems:
        register_strategy(
            name, settings=settings, strategy=strategy, summary=strategy.__doc__ or name, ranked=False
        )
    try:
        yield
    finally:
        for name, _, _ in systems:
            del STRATEGIES._entries[name]
