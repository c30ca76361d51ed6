"""SmartMoE: devices exchange owned experts, and each device keeps its number of experts.

Hecate compares itself with this method (§2.3, §5.1).

Shape letters: E experts, D devices.
"""

import numpy as np


def permuted_owners(owner_E: np.ndarray, load_E: np.ndarray, num_devices: int) -> np.ndarray:
    """Compute new owners of one layer.

    Each expert, the most loaded first, goes to the least loaded device that has room. Every device has room
    for E/D experts. Among equally loaded devices the present owner comes first, so that fewer experts move,
    and then the lowest device.

    Args:
        owner_E: Present owner of every expert, integers ``[E]``. Every device owns equally many experts.
        load_E: Recent load of every expert, ``[E]``, in any unit.
        num_devices: Number of devices, D.

    Returns:
        New owner of every expert, int64 ``[E]``.

    Raises:
        ValueError: The experts cannot be exchanged (:func:`check_exchangeable`).
    """
    per_device = check_exchangeable(owner_E, num_devices)
    load_D, room_D = np.zeros(num_devices), np.full(num_devices, per_device)
    new_E = np.array(owner_E, dtype=np.int64)
    for expert in np.argsort(-np.asarray(load_E, dtype=float), kind="stable").tolist():
        open_load_D, present = np.where(room_D > 0, load_D, np.inf), new_E[expert]
        if open_load_D[present] > open_load_D.min():
            new_E[expert] = open_load_D.argmin()
        load_D[new_E[expert]] += load_E[expert]
        room_D[new_E[expert]] -= 1
    return new_E


def check_exchangeable(owner_E: np.ndarray, num_devices: int) -> int:
    """Number of experts that each device owns, if an exchange is possible and useful, or on one device.

    Args:
        owner_E: Present owner of every expert, integers ``[E]``.
        num_devices: Number of devices, D.

    Raises:
        ValueError: The devices own different numbers of experts, or every device owns only one. In the latter
            case an exchange would not change any device's load, only which device has it.
    """
    owned_D = np.bincount(owner_E, minlength=num_devices)
    per_device = len(owner_E) // num_devices
    if len(owned_D) != num_devices or (owned_D != per_device).any():
        raise ValueError(
            f"devices own {owned_D.tolist()} experts: wanted {len(owner_E) / num_devices:g} on each of the "
            f"{num_devices}, because SmartMoE exchanges experts one for one"
        )
    if per_device < 2 and num_devices > 1:
        raise ValueError(
            "every device owns one expert: wanted two or more, because exchanging all experts of two devices "
            "balances nothing; use more experts, fewer expert-parallel ranks, or another strategy"
        )
    return per_device
