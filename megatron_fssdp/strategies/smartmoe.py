"""SmartMoE: owners exchanged every so many iterations, where that pays off until the next time."""

import numpy as np

from megatron_fssdp.config.strategy_settings import SmartmoeSettings
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import placement_seconds
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.papers.expert_permutation import check_exchangeable, permuted_owners
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.owner_moves import exchange_s
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan, Strategy


class SmartmoeStrategy(Strategy[SmartmoeSettings]):
    """``smartmoe``: as many experts a device as before, no replicas (Hecate §2.3, §5.1)."""

    overlaps = False  # there are no transfers

    @property
    def window(self) -> int:
        """Iterations whose mean load decides."""
        return self.settings.window

    @property
    def profile_iterations(self) -> int:
        """Iterations to measure: savings are compared with what a change moves."""
        return self.settings.profile_iterations

    def may_replicate(self, layer: int) -> bool:
        """Never."""
        return False

    def check(self, context: LayerContext) -> None:
        """Refuse one expert a device."""
        check_exchangeable(context.owner_E, context.num_devices)

    def slots(self, context: LayerContext) -> int:
        """No replicas."""
        return 0

    def limits(self, context: LayerContext) -> str:
        """Every device keeps its number of experts."""
        return f"exchanges of owners are reconsidered every {self.settings.reshard_interval} iterations"

    def reshards_at(self, iteration: int) -> bool:
        """Every ``reshard_interval`` iterations."""
        return iteration > 0 and iteration % self.settings.reshard_interval == 0

    def reshard_layer(self, context: LayerContext, load_E: np.ndarray) -> np.ndarray:
        """One layer's owners, exchanged if that pays until the next time."""
        old_E, profile, topology = context.owner_E, context.profile, context.topology
        if profile is None or not load_E.any():
            return old_E
        new_E = permuted_owners(old_E, load_E, context.num_devices)
        saved_s = self.settings.reshard_interval * (
            _layer_s(old_E, load_E, profile, topology) - _layer_s(new_E, load_E, profile, topology)
        )
        return new_E if saved_s > exchange_s(old_E, new_E, profile, topology) else old_E

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Owners only."""
        return LayerPlan.owners_only(context)


def _layer_s(owner_E: np.ndarray, load_E: np.ndarray, profile: LayerProfile, topology: Topology) -> float:
    """An iteration of the layer, every source sending as much to an expert as every other."""
    num_devices = topology.num_devices
    counts_DE = np.tile(np.rint(load_E / num_devices).astype(np.int64), (num_devices, 1))
    placement = ExpertPlacement.owners_only(owner_E, num_devices)
    price = placement_seconds(counts_DE, placement, topology, profile, ReplicaLife.ITERATION)
    return float(price.seconds)
