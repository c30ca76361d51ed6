"""SmartMoE: owners are exchanged at an interval, and nothing is replicated.

Shape letters: D devices, E experts.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_fssdp.config.strategy.strategy_settings import profile_iterations
from megatron_fssdp.planning.cost.layer_seconds import moving_seconds
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.strategies.ep.ep_strategy import EpStrategy
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import plan_price
from megatron_fssdp.strategies.smartmoe import SmartmoeSettings
from megatron_fssdp.strategies.strategy import MovesOwners


class SmartmoeStrategy(EpStrategy[SmartmoeSettings], MovesOwners[SmartmoeSettings]):
    """``smartmoe``: permutes owners at an interval, without replicas (Hecate §2.3, §5.1)."""

    def __init__(self, settings: SmartmoeSettings) -> None:
        super().__init__(settings)
        self.window, self.profile_iterations = settings.window, profile_iterations()

    def check(self, context: LayerContext) -> None:
        """Refuse, by a ValueError, devices that do not own equally many experts, two or more."""
        owned_D = np.bincount(context.owner_E, minlength=context.num_devices)
        if np.ptp(owned_D) or (owned_D[0] < 2 and context.num_devices > 1):
            raise ValueError(
                f"devices own {owned_D.tolist()} experts: wanted two or more on each, equally many, because "
                "exchanging all experts of two devices balances nothing; use more experts, fewer "
                "expert-parallel ranks, or another strategy"
            )

    def reshards_at(self, iteration: int) -> bool:
        """Whether ``iteration`` is a multiple of ``reshard_interval`` and not 0."""
        return iteration > 0 and iteration % self.settings.reshard_interval == 0

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """New owners for all layers; the devices own equally many experts of each layer afterwards.

        Owners of a checkpoint may be uneven. All such layers become even at one time, so that no device needs
        more slots.
        """
        device_LE = owners.device_LE.copy()
        for owner_E in device_LE:
            if np.ptp(np.bincount(owner_E, minlength=owners.num_devices)):
                owner_E[:] = even_owners(owners.num_experts, owners.num_devices)
        if not np.array_equal(device_LE, owners.device_LE):
            return owners.with_owners(device_LE)
        return super().reshard(contexts, load_LE, owners)

    def reshard_layer(self, context: LayerContext, load_E: np.ndarray) -> np.ndarray:
        """New owners of one layer, or the present ones if an exchange would not pay until the next one."""
        old_E, profile = context.owner_E, context.profile
        if profile is None or not load_E.any() or context.num_experts < context.num_devices:
            # With at most one expert on a device, an exchange would only change which device has it.
            return old_E
        new_E = permuted_owners(old_E, load_E, context.num_devices)
        # Every source is assumed to send an expert equally much.
        counts_DE = np.tile(np.rint(load_E / context.num_devices).astype(np.int64), (context.num_devices, 1))
        old_s, new_s = (
            plan_price(LayerPlan.owners_only(of), counts_DE, of).seconds
            for of in (context, replace(context, owner_E=new_E))
        )
        saved_s = self.settings.reshard_interval * (old_s - new_s)
        return new_E if saved_s > moving_seconds(old_E, new_E, context.topology, profile) else old_E


def permuted_owners(owner_E: np.ndarray, load_E: np.ndarray, num_devices: int) -> np.ndarray:
    """New owners of one layer, int64 ``[E]``; every device owns E/D experts before and after.

    Each expert, the most loaded first, goes to the least loaded device that has room. Among equally loaded
    devices the present owner comes first, so that fewer experts move, and then the lowest device.
    """
    load_D, room_D = np.zeros(num_devices), np.full(num_devices, len(owner_E) // num_devices)
    new_E = np.array(owner_E, dtype=np.int64)
    for expert in np.argsort(-np.asarray(load_E, dtype=float), kind="stable").tolist():
        open_load_D, present = np.where(room_D > 0, load_D, np.inf), new_E[expert]
        if open_load_D[present] > open_load_D.min():
            new_E[expert] = open_load_D.argmin()
        load_D[new_E[expert]] += load_E[expert]
        room_D[new_E[expert]] -= 1
    return new_E
