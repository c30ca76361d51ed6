"""SmartMoE: owners exchanged every so many iterations, where that pays off until the next time."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_fssdp.config.strategy_settings import SmartmoeSettings
from megatron_fssdp.planning.cost import cost_model
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.papers.expert_permutation import check_exchangeable, permuted_owners
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.fixed_owners import DecidedByHistory
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan


class SmartmoeStrategy(DecidedByHistory[SmartmoeSettings]):
    """``smartmoe``: as many experts a device as before, no replicas (Hecate §2.3, §5.1)."""

    replica_life = ReplicaLife.ITERATION

    def check(self, context: LayerContext) -> None:
        """Refuse one expert a device."""
        check_exchangeable(context.owner_E, context.num_devices)

    def slots(self, context: LayerContext) -> int:
        """No replicas."""
        return 0

    def limits(self, context: LayerContext) -> str:
        """Every device keeps its number of experts."""
        return f"exchanges are thought over every {self.settings.reshard_interval} iterations"

    def reshards_at(self, iteration: int) -> bool:
        """Every ``reshard_interval`` iterations."""
        return iteration > 0 and iteration % self.settings.reshard_interval == 0

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """The layers' exchanges whose modelled saving until the next time is above their cost."""
        device_LE = owners.device_LE.copy()
        for layer, context in enumerate(contexts):
            context = replace(context, owner_E=owners.device_LE[layer])
            device_LE[layer] = self.exchanged_owners(context, load_LE[layer])
        return owners.with_owners(device_LE)

    def exchanged_owners(self, context: LayerContext, load_E: np.ndarray) -> np.ndarray:
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

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """The plan as it is."""
        return plan


def _layer_s(owner_E: np.ndarray, load_E: np.ndarray, profile: LayerProfile, topology: Topology) -> float:
    """An iteration of the layer, every source sending as much to an expert as every other."""
    num_devices = topology.num_devices
    counts_DE = np.tile(np.rint(load_E / num_devices).astype(np.int64), (num_devices, 1))
    return cost_model.dispatched_layer_s(
        counts_DE,
        ExpertPlacement.owners_only(owner_E, num_devices),
        topology,
        cluster=profile.cluster,
        token_bytes=profile.token_bytes,
        flops_per_token=profile.flops_per_token,
    )


def exchange_s(old_E: np.ndarray, new_E: np.ndarray, profile: LayerProfile, topology: Topology) -> float:
    """Seconds to move weights and optimizer states of the experts whose device changes.

    Args:
        old_E: Device of every expert.
        new_E: Its device afterwards.
        profile: Of the layer.
        topology: Nodes of the devices.
    """
    experts_DD = np.zeros((topology.num_devices, topology.num_devices), np.int64)
    moves = old_E != new_E
    np.add.at(experts_DD, (old_E[moves], new_E[moves]), 1)
    return cost_model.all_to_all_s(experts_DD, profile.moved_bytes, topology, profile.cluster)
