"""SmartMoE's baseline: owners exchanged among devices, each device with as many experts as before.

Hecate compares with it (§2.3, §5.1).

Shape letters: E experts, D devices.
"""

import numpy as np


def permuted_owners(owner_E: np.ndarray, load_E: np.ndarray, num_devices: int) -> np.ndarray:
    """New owners of one layer: each expert, most loaded first, to the least loaded device with room.

    Room is E/D experts a device. Of equally loaded devices the present owner is taken if it is among
    them, so that less moves, else the lowest.

    Args:
        owner_E: Present owner of every expert, as many experts on every device, integers [E].
        load_E: Recent load of every expert, [E].
        num_devices: D.

    Returns:
        int64 [E].

    Raises:
        ValueError: As :func:`check_exchangeable`.
    """
    per_device = check_exchangeable(owner_E, num_devices)
    owner = np.asarray(owner_E, dtype=np.int64)
    load_D = np.zeros(num_devices)
    room_D = np.full(num_devices, per_device)
    new_E = np.empty_like(owner)
    for expert in np.argsort(-np.asarray(load_E, dtype=float), kind="stable").tolist():
        open_load_D = np.where(room_D > 0, load_D, np.inf)
        least = open_load_D.min()
        present = int(owner[expert])
        device = present if open_load_D[present] == least else int(open_load_D.argmin())
        new_E[expert] = device
        load_D[device] += load_E[expert]
        room_D[device] -= 1
    return new_E


def check_exchangeable(owner_E: np.ndarray, num_devices: int) -> int:
    """Experts a device, if there are as many on each and more than one.

    Raises:
        ValueError: The experts are not spread evenly, or every device has only one, so that an
            exchange would change nothing but names. A group of one device has nothing to exchange.
    """
    owned_D = np.bincount(owner_E, minlength=num_devices)
    per_device = len(owner_E) // num_devices
    if len(owned_D) != num_devices or (owned_D != per_device).any():
        raise ValueError(
            f"devices own {owned_D.tolist()} experts: wanted {len(owner_E) / num_devices:g} on each of the "
            f"{num_devices}; SmartMoE exchanges experts one for one"
        )
    if per_device < 2 and num_devices > 1:
        raise ValueError(
            "every device owns one expert: wanted two or more, because an exchange of whole devices' experts "
            "balances nothing; use more experts, fewer expert-parallel ranks, or another strategy"
        )
    return per_device
