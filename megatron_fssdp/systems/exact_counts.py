"""Systems of others that plan every micro-batch after its gate: UltraEP, MoonEP and LLEP.

In all, tokens wait for the weights of replicas, and gradients travel home beside the backward pass. Assumed
of all: weights travel in the trees of this project, and replicas stay until the backward pass. The planners
below take owners and pairs of experts, ``[E]``, and give int64 ``[E, D]``. Ties go to the lowest index.

Shape letters: D devices, E experts.
"""

from abc import abstractmethod

import numpy as np

from megatron_fssdp.config.loading import setting
from megatron_fssdp.config.strategy.strategy_settings import SlotKeys
from megatron_fssdp.planning.loads import max_over_mean
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.strategy import ReplicasAfterGate


class UltraepKeys(SlotKeys):
    """Keys of ``ultraep-like``."""

    slots: int | None = setting(
        2, "Redundant experts of a layer on a device, by default as in its tests.", ge=0
    )


class ExactCounts(ReplicasAfterGate[SlotKeys]):
    """Divides the pairs of every micro-batch among the devices, whatever that costs."""

    @abstractmethod
    def tokens_ED(self, context: LayerContext, counts_DE: np.ndarray) -> np.ndarray:
        """Pairs of each expert that each device computes, int64 ``[E, D]``."""

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """The plan for the counts of this micro-batch."""
        tokens_ED = self.tokens_ED(context, counts_DE)
        placement = ExpertPlacement(context.owner_E, plan.placement.present_ED | (tokens_ED > 0))
        return self.plan_of(placement, context, each_micro_batch=True, tokens_ED=tokens_ED)


class UltraepSystem(ExactCounts):
    """Lowest ceiling of loads, replicas in the owner's node (arXiv 2606.04101, Dots-Infra/UltraEP).

    Assumed: a node is an NVLink domain; the second search of its kernel, for slots that are scarce, has no
    least number of pairs of a replica (1,024 there).
    """

    def tokens_ED(self, context: LayerContext, counts_DE: np.ndarray) -> np.ndarray:
        """Pairs of each expert that each device computes, int64 ``[E, D]``."""
        layer = context.owner_E, counts_DE.sum(axis=0), context.topology
        return quotas_in_nodes(*layer, slots=self.slots(context))


class MoonepSystem(ExactCounts):
    """Equal rows on all devices, however skewed the routing is (github.com/MoonshotAI/MoonEP).

    Assumed: planning, whose overhead it calls negligible, takes no time; replicas may cross nodes.
    """

    def tokens_ED(self, context: LayerContext, counts_DE: np.ndarray) -> np.ndarray:
        """Pairs of each expert that each device computes, int64 ``[E, D]``."""
        return equal_rows(context.owner_E, counts_DE.sum(axis=0), context.num_devices)


class LlepSystem(ExactCounts):
    """Least-loaded expert parallelism (arXiv 2601.17111, SalesforceAIResearch/LeastLoadedEP).

    λ, α and m are those of the example in its README. Assumed: planning takes no time.
    """

    def tokens_ED(self, context: LayerContext, counts_DE: np.ndarray) -> np.ndarray:
        """Pairs of each expert that each device computes, int64 ``[E, D]``."""
        layer = context.owner_E, counts_DE.sum(axis=0), context.num_devices
        return least_loaded(*layer, threshold=1.3, factor=1.0, fewest=1024)


def quotas_in_nodes(owner_E: np.ndarray, load_E: np.ndarray, topology: Topology, *, slots: int) -> np.ndarray:
    """UltraEP: the lowest ceiling of device loads in each node, with replicas only in the owner's node.

    A device has at most ``slots`` replicas. Ceilings begin 1 % above the mean, and the search ends when it is
    that close.
    """
    tokens_ED = _at_owners(owner_E, load_E, topology.num_devices)
    for devices in map(list, topology.devices_by_node):
        load_D, plain_ED = tokens_ED[:, devices].sum(axis=0), tokens_ED
        low, high = int(np.ceil(1.01 * load_D.mean())), int(load_D.max())
        ceiling = low
        while low < high:
            found_ED = _below(ceiling, plain_ED, owner_E, devices, slots)
            low, high = (ceiling + 1, high) if found_ED is None else (low, ceiling)
            tokens_ED = tokens_ED if found_ED is None else found_ED
            if high - low < 0.01 * load_D.mean():
                break
            ceiling = (low + high) // 2
    return tokens_ED


def _below(
    ceiling: int, tokens_ED: np.ndarray, owner_E: np.ndarray, devices: list[int], slots: int
) -> np.ndarray | None:
    """Pairs with which no device of a node is above the ceiling, or ``None`` if the slots do not suffice.

    The most loaded owner comes first, and of its experts the most loaded one, of which a pair stays. What is
    too much goes to the emptiest device, but not in smaller parts than all devices with room would get.
    """
    tokens_ED, load_D = tokens_ED.copy(), tokens_ED.sum(axis=0)
    free_D = np.zeros(len(load_D), np.int64)
    free_D[devices] = slots
    for owner in np.take(devices, np.argsort(-load_D[devices], kind="stable")):
        own = np.flatnonzero(owner_E == owner)
        for expert in own[np.argsort(-tokens_ED[own, owner], kind="stable")]:
            while (above := load_D[owner] - ceiling) > 0:
                room_D = np.where((free_D > 0) & (tokens_ED[expert] == 0), ceiling - load_D, 0)
                device = room_D.argmax()
                part = min(above, room_D[device], tokens_ED[expert, owner] - 1)
                if part < 1 or part * np.count_nonzero(room_D > 0) < above:
                    break
                tokens_ED[expert, [owner, device]] += (-part, part)
                load_D[[owner, device]] += (-part, part)
                free_D[device] -= 1
        if load_D[owner] > ceiling:
            return None
    return tokens_ED


def equal_rows(owner_E: np.ndarray, load_E: np.ndarray, num_devices: int) -> np.ndarray:
    """MoonEP: every device computes equally many pairs, with as many replicas as that takes.

    The most overloaded owner fills the emptiest device until all are equal, so a device gets experts of one
    other owner at most. An owner gives its most loaded expert to the device with the largest claim. If the
    devices do not divide the pairs, some have one more.
    """
    tokens_ED = _at_owners(owner_E, load_E, num_devices)
    wanted_D = np.diff(np.arange(num_devices + 1) * tokens_ED.sum() // num_devices)
    surplus_D = tokens_ED.sum(axis=0) - wanted_D
    claim_DD = np.zeros((num_devices, num_devices), np.int64)
    while (owner := surplus_D.argmax()) != (device := surplus_D.argmin()):
        claim_DD[owner, device] = -surplus_D[device]
        surplus_D[owner] += surplus_D[device]
        surplus_D[device] = 0
    for owner, claim_D in enumerate(claim_DD):
        own = np.flatnonzero(owner_E == owner)
        while claim_D.any():
            device, expert = int(claim_D.argmax()), int(own[tokens_ED[own, owner].argmax()])
            number = min(claim_D[device], tokens_ED[expert, owner])
            tokens_ED[expert, [owner, device]] += (-number, number)
            claim_D[device] -= number
    return tokens_ED


def least_loaded(
    owner_E: np.ndarray, load_E: np.ndarray, num_devices: int, *, threshold: float, factor: float, fewest: int
) -> np.ndarray:
    """LLEP: what an owner has above ``factor`` times the mean load spills to the least loaded devices.

    Nothing does below a max/mean device load of ``threshold``. Experts spill in the order of their
    loads, the highest first. Parts of fewer than ``fewest`` pairs are not spilled, unless nothing else is
    left. If no device has room, the least loaded other one takes the rest.
    """
    tokens_ED = _at_owners(owner_E, load_E, num_devices)
    load_D, most = tokens_ED.sum(axis=0), max(int(factor * (load_E.sum() // num_devices)), 1)
    spills = num_devices > 1 and max_over_mean(load_D) >= threshold
    for expert in np.argsort(-load_E, kind="stable") if spills else ():
        owner = owner_E[expert]
        left = min(max(load_D[owner] - most, 0), load_E[expert])
        while left > 0:
            others = np.argsort(load_D, kind="stable")
            others = others[others != owner]
            part_D = np.minimum(most - load_D[others], left)
            fits_D = (part_D > 0) & ((part_D >= fewest) | (part_D == left))
            device, part = (others[fits_D][0], part_D[fits_D][0]) if fits_D.any() else (others[0], left)
            tokens_ED[expert, [owner, device]] += (-part, part)
            load_D[[owner, device]] += (-part, part)
            left -= part
    return tokens_ED


def _at_owners(owner_E: np.ndarray, load_E: np.ndarray, num_devices: int) -> np.ndarray:
    return np.asarray(load_E, np.int64)[:, None] * (np.asarray(owner_E)[:, None] == np.arange(num_devices))
