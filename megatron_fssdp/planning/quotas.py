"""Exact quotas: how many tokens of each expert each device computes (ours, after ECHO and UltraEP).

Shape letters: E experts, D devices.
"""

import numpy as np

from megatron_fssdp.planning.arrays import checked_counts
from megatron_fssdp.planning.compiled_form import kernel
from megatron_fssdp.planning.placement.topology import Topology

CEILING_TOLERANCE = 0.005
"""The search for the lowest ceiling stops at this precision, a part of the mean device load."""


def quota_assignment(
    owner_E: np.ndarray, counts_DE: np.ndarray, topology: Topology, *, slots: int
) -> np.ndarray:
    """Plan which device computes how many tokens of each expert: int64 ``[E, D]``, from pairs ``[D, E]``.

    A binary search finds the lowest possible ceiling of device loads with at most ``slots`` experts of other
    owners on a device (m). An owner above the ceiling spills tokens of its most loaded experts first, to
    devices with room in the nodes from which most of the expert's tokens come, then with the lowest number.
    """
    owner = np.asarray(owner_E, dtype=np.int64)
    num_experts, num_devices = len(owner), topology.num_devices
    counts = checked_counts(counts_DE, num_devices, num_experts)
    load_E = counts.sum(axis=0)
    load_D = np.bincount(owner, weights=load_E, minlength=num_devices).astype(np.int64)
    tokens_ED = np.zeros((num_experts, num_devices), np.int64)
    tokens_ED[np.arange(num_experts), owner] = load_E
    from_node_ED = topology.sum_over_nodes(counts).T[:, topology.node_of_device_D]
    first_D = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=num_devices))])
    busiest_D, nearest_ED = (np.argsort(-of, axis=-1, kind="stable") for of in (load_D, from_node_ED))
    layer = load_E, np.lexsort((-load_E, owner)), first_D, busiest_D, nearest_ED
    spilled = np.zeros((max(num_devices * min(slots, num_experts), 1), 3), np.int64)

    def spill(ceiling: int) -> int:
        """Spill all tokens above a ceiling; the number of rows of ``spilled``, or -1 if there is no room."""
        left_D = np.full(num_devices, slots, np.int64)
        return int(kernel("greedy_planners").spill_below(*layer, ceiling - load_D, left_D, spilled))

    low, high = -(-int(load_E.sum()) // num_devices), int(load_D.max())
    ceiling = low
    while low < high:
        low, high = (ceiling + 1, high) if spill(ceiling) < 0 else (low, ceiling)
        if high - low <= CEILING_TOLERANCE * float(load_E.sum()) / num_devices:
            break
        ceiling = (low + high) // 2
    expert_P, device_P, number_P = spilled[: spill(high)].T
    np.add.at(tokens_ED, (expert_P, device_P), number_P)
    np.subtract.at(tokens_ED, (expert_P, owner[expert_P]), number_P)
    return tokens_ED
