"""Exchanges of owners: every device has as many experts before as after (SmartMoE).

Shape letters: E experts, D devices.
"""

import numpy as np


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


def check_exchangeable(owner_E: np.ndarray, num_devices: int) -> None:
    """Raise a ValueError unless devices own equally many experts, two or more, or there is one device."""
    owned_D = np.bincount(owner_E, minlength=num_devices)
    if np.ptp(owned_D) or (owned_D[0] < 2 and num_devices > 1):
        raise ValueError(
            f"devices own {owned_D.tolist()} experts: wanted two or more on each, equally many, because "
            "exchanging all experts of two devices balances nothing; use more experts, fewer expert-parallel "
            "ranks, or another strategy"
        )
