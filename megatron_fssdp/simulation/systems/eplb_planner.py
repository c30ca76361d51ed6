"""EPLB: which expert is in each physical slot, hierarchically or globally (github.com/deepseek-ai/EPLB).

All copies of experts are placed anew, also those of owners, and a device may get two copies of one expert.
Sums and quotients are in float32, as there, so that ties are the same.

Shape letters: E experts, D devices, U slots of a device, B bins, P copies of experts.
"""

import numpy as np


def eplb_slots(
    load_E: np.ndarray, num_devices: int, *, slots: int, num_nodes: int = 1, num_groups: int = 1
) -> np.ndarray:
    """The expert in each of the ``slots`` of each device, int64 ``[D, U]``, for loads ``[E]`` of experts.

    If the nodes divide the groups of consecutive experts, groups are packed to nodes first, and their experts
    are copied and packed to devices inside the node (hierarchical). Otherwise all nodes are one (global).
    The sizes divide each other, and there are at least as many slots as experts.
    """
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    loads_E, devices = np.asarray(load_E, np.float32), num_devices // num_nodes
    experts_of_group = np.arange(len(loads_E)).reshape(num_groups, -1)
    found = []
    for groups in _packed(loads_E[experts_of_group].sum(axis=1), num_nodes):
        expert_E = experts_of_group[groups].ravel()
        copy_P = _copied(loads_E[expert_E], devices * slots)
        each_E = loads_E[expert_E] / np.bincount(copy_P).astype(np.float32)
        found += [expert_E[copy_P[items]] for items in _packed(each_E[copy_P], devices)]
    return np.stack(found)


def _packed(weight_P: np.ndarray, num_bins: int) -> np.ndarray:
    """Items of equally full bins, int64 ``[B, P / B]``: the heaviest first, to the lightest bin with room."""
    room = len(weight_P) // num_bins
    if room == 1:
        return np.arange(num_bins)[:, None]
    weight_B, number_B = np.zeros(num_bins, np.float32), np.zeros(num_bins, np.int64)
    item_BP = np.empty((num_bins, room), np.int64)
    for item in np.argsort(-weight_P, kind="stable"):
        chosen = np.where(number_B < room, weight_B, np.inf).argmin()
        item_BP[chosen, number_B[chosen]] = item
        weight_B[chosen] += weight_P[item]
        number_B[chosen] += 1
    return item_BP


def _copied(load_E: np.ndarray, num_copies: int) -> np.ndarray:
    """The expert of each copy, int64 ``[P]``: all experts, then always the one whose copies have most."""
    copies_E, copy_P = np.ones(len(load_E), np.float32), np.arange(num_copies)
    for number in range(len(load_E), num_copies):
        copy_P[number] = (load_E / copies_E).argmax()
        copies_E[copy_P[number]] += 1
    return copy_P
