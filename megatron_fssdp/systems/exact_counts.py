"""Systems of others that plan every micro-batch after its gate: UltraEP, MoonEP and LLEP.

In all, tokens wait for the weights of replicas, and gradients travel home beside the backward pass. Assumed
of all: weights travel in the trees of this project, and replicas stay until the backward pass. The planners
below take owners and pairs of experts, ``[E]``, and give int64 ``[E, D]``. Ties go to the lowest index.

Shape letters: D devices, E experts.
"""

from collections.abc import Callable

import numpy as np

from megatron_fssdp.config.loading import setting
from megatron_fssdp.config.strategy.strategy_settings import SlotKeys
from megatron_fssdp.planning.loads import max_over_mean
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.strategy import ReplicasAfterGate


class UltraepKeys(SlotKeys):
    """Keys of ``ultraep-like``."""

    slots: int | None = setting(
        2, "Redundant experts of a layer on a device, by default as in its tests.", ge=0
    )


class ExactCounts(ReplicasAfterGate[SlotKeys]):
    """Divides the pairs of every micro-batch among the devices by a planner, whatever that costs.

    The planner gets a layer, the pairs of its experts ``[E]`` and the most replicas of a device.
    """

    def __init__(
        self, settings: SlotKeys, planner: Callable[[LayerContext, np.ndarray, int], np.ndarray]
    ) -> None:
        super().__init__(settings)
        self._planner = planner

    def exact_plan(self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan) -> LayerPlan:
        """The plan for the counts of this micro-batch."""
        tokens_ED = self._planner(context, counts_DE.sum(axis=0), self.slots(context))
        return self.plan_by_quotas(tokens_ED, context)

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """:meth:`exact_plan`, also before costs are measured."""
        return self.exact_plan(context, counts_DE, plan)


def quotas_in_nodes(owner_E: np.ndarray, load_E: np.ndarray, topology: Topology, *, slots: int) -> np.ndarray:
    """UltraEP: the lowest ceiling of loads in each node, with replicas only in the owner's node.

    (arXiv 2606.04101, Dots-Infra/UltraEP.) A device has at most ``slots`` replicas. Ceilings begin 1 % above
    the mean, and the search ends when it is that close. Assumed: a node is an NVLink domain; the second
    search of its kernel, for slots that are scarce, has no least number of pairs of a replica (1,024 there).
    """
    tokens_ED = _at_owners(owner_E, load_E, topology.num_devices)
    for devices in map(list, topology.devices_by_node):
        load_D, plain_ED = tokens_ED[:, devices].sum(axis=0), tokens_ED
        low, high = int(np.ceil(1.01 * load_D.mean())), int(load_D.max())
        ceiling = low
        while low < high:
            fitting_ED = _below(ceiling, plain_ED, owner_E, devices, slots)
            low, high = (ceiling + 1, high) if fitting_ED is None else (low, ceiling)
            tokens_ED = tokens_ED if fitting_ED is None else fitting_ED
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
    """MoonEP: every device computes equally many pairs, however skewed the routing is.

    (github.com/MoonshotAI/MoonEP.) There are as many replicas as that takes, which may cross nodes. Planning,
    whose overhead it calls negligible, is assumed to take no time. The most overloaded owner fills the
    emptiest device until all are equal, so a device gets experts of one other owner at most. An owner gives
    its most loaded expert to the device with the largest claim. If the devices do not divide the pairs, some
    have one more.
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
    owner_E: np.ndarray, load_E: np.ndarray, num_devices: int, *, threshold: float = 1.3, fewest: int = 1024
) -> np.ndarray:
    """LLEP: what an owner has above the mean load (α = 1) spills to the least loaded devices.

    (arXiv 2601.17111, SalesforceAIResearch/LeastLoadedEP.) λ (``threshold``), α and m (``fewest``) are those
    of the example in its README; planning is assumed to take no time. Nothing spills below a max/mean device
    load of λ. Experts spill in the order of their loads, the highest first. Parts of fewer than m pairs are
    not spilled, unless nothing else is left. If no device has room, the least loaded other one takes the
    rest.
    """
    tokens_ED = _at_owners(owner_E, load_E, num_devices)
    load_D, most = tokens_ED.sum(axis=0), max(int(load_E.sum() // num_devices), 1)
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
