"""FlexMoE: replicas that outlive iterations and train along with their owners."""

import numpy as np

from megatron_fssdp.config.strategy_settings import FlexmoeSettings
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.papers.flexmoe_planner import ReplicaPrice, next_resident_placement
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan, Strategy


class FlexmoeStrategy(Strategy[FlexmoeSettings]):
    """``flexmoe``: expand, shrink and migrate every so many iterations (Hecate §2.3, §5.1)."""

    replica_life = ReplicaLife.RESIDENT

    @property
    def window(self) -> int:
        """Iterations whose mean load decides."""
        return self.settings.window

    @property
    def profile_iterations(self) -> int:
        """Iterations to measure: savings are compared with what a change moves."""
        return self.settings.profile_iterations

    @property
    def overlaps(self) -> bool:
        """As set."""
        return self.settings.overlap

    @property
    def resident_slots(self) -> int:
        """As set."""
        return self.settings.slots

    def slots(self, context: LayerContext) -> int:
        """Most replicas that a device may hold of a layer."""
        return self.resident_slots

    def limits(self, context: LayerContext) -> str:
        """How often the strategy reconsiders its replicas."""
        return (
            f"slots m = {self.settings.slots}, replicas are reconsidered every "
            f"{self.settings.placement_interval} iterations"
        )

    def replicates_at(self, iteration: int) -> bool:
        """Every ``placement_interval`` iterations."""
        return iteration > 0 and iteration % self.settings.placement_interval == 0

    def replicate(self, context: LayerContext, load_DE: np.ndarray) -> ExpertPlacement:
        """Steps that pay off until the next time, from the present replicas on."""
        present = context.placement
        if context.profile is None or not load_DE.any():
            return present
        price = ReplicaPrice(
            np.rint(load_DE).astype(np.int64),
            context.topology,
            context.profile,
            self.settings.placement_interval,
        )
        return next_resident_placement(
            present,
            price,
            slots=self.settings.slots,
            threshold=self.settings.threshold,
            most_steps=self.settings.most_steps,
        )

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """The replicas that are there."""
        placement = context.placement
        if not placement.num_replicas:
            return LayerPlan.owners_only(context)
        return LayerPlan(
            placement,
            two_level_transfer(placement, context.topology),
            gather_ahead=self.settings.overlap,
            resident=True,
        )
