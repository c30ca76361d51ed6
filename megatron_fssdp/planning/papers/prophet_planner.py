"""Pro-Prophet's planner: it replicates the most loaded experts on a subset of the devices (Pro-Prophet, §IV).

Shape letters: E experts, D devices.
"""

from collections.abc import Sequence

import numpy as np

from megatron_fssdp.planning.arrays import checked_counts
from megatron_fssdp.planning.compiled_form import kernels
from megatron_fssdp.planning.papers.prophet_model import ProphetModel
from megatron_fssdp.planning.placement.placement import ExpertPlacement

ROUNDING = 1e-9
"""More than the relative rounding error of modelled seconds."""


def plan_layers(
    owner_E: np.ndarray,
    counts_DE: np.ndarray,
    model: ProphetModel,
    left_out: Sequence[int],
    *,
    balance: float = 0.5,
    slots: int | None = None,
) -> list[tuple[ExpertPlacement, float]]:
    """Plan one layer by the greedy search, once for each of several numbers ``n`` (Pro-Prophet, Alg. 1).

    Each step takes the most loaded device, and of its experts the most loaded one that has not been selected
    yet. The expert is sent to all devices except the ``n`` devices that have the fewest inputs for it. Inputs
    on devices that have the expert then stay there. All other inputs go to its owner, as before. The steps
    end when the load is balanced. The result is the sequence of first steps with the fewest modelled seconds,
    or no step if none lowers them.

    Args:
        owner_E: Owner of every expert, integers ``[E]``.
        counts_DE: (token, k) pairs of an iteration by source device and expert, integers ``[D, E]``.
        model: The performance model of the layer.
        left_out: The numbers ``n`` of devices to which a selected expert is not sent.
        balance: ``α`` of Eq. 7. The load is balanced if ``max(H) − min(H) < α · I / E``, with ``I`` inputs in
            all.
        slots: Most replicas that a device may hold. None means no limit, as in the paper.

    Returns:
        For each number a placement, and its modelled seconds, which are at most those without replicas.

    Raises:
        ValueError: ``balance`` is negative, a number of ``left_out`` is out of range, or the counts do not
            match the owners and devices.
    """
    num_experts, num_devices = len(owner_E), model.num_devices
    if balance < 0:
        raise ValueError(f"balance is {balance}: wanted 0 or more (Pro-Prophet, Eq. 7)")
    for number in left_out:
        if not 0 <= number < num_devices:
            raise ValueError(
                f"num_left_out is {number} of {num_devices} devices: wanted 0 up to {num_devices - 1}"
            )
    plain = ExpertPlacement.owners_only(owner_E, num_devices)
    owner = plain.owner_E
    counts = checked_counts(counts_DE, num_devices, num_experts)
    load_E, inputs_ED = counts.sum(axis=0), np.ascontiguousarray(counts.T)
    computed_D, own_D = (
        np.bincount(owner, weights=tokens_E, minlength=num_devices).astype(np.int64)
        for tokens_E in (load_E, counts[owner, np.arange(num_experts)])
    )
    plain_s = float(model.layer_s(computed_D - own_D, computed_D, 0, 0))
    fewest_first_ED = np.argsort(inputs_ED, axis=1, kind="stable")
    layer = tuple(memoryview(np.array(array)) for array in (owner, load_E, inputs_ED, fewest_first_ED))
    found = []
    for number in left_out:
        # More steps would take longer than no replicas even if they left no all-to-all and level loads.
        steps = np.arange(1, num_experts + 1)
        least_s = model.step_s(0.0, load_E.sum() / num_devices, steps, number)
        after, replicas = kernels().greedy_steps(
            layer,
            computed_D,
            computed_D - own_D,
            tolerance=balance * int(load_E.sum()) / num_experts,
            num_left_out=number,
            slots=num_experts if slots is None else min(slots, num_experts),
            most_steps=int((least_s * (1 - ROUNDING) < plain_s).sum()),
        )
        placement, seconds = plain, plain_s
        if len(after):
            step_s = model.step_s(after[:, 1], after[:, 2], steps[: len(after)], number)
            best = int(step_s.argmin())
            if step_s[best] < plain_s:
                present_ED = plain.present_ED.copy()
                expert_P, device_P = replicas[: after[best, 0]].T
                present_ED[expert_P, device_P] = True
                placement = ExpertPlacement(owner, present_ED, slots=slots)
                seconds = float(step_s[best])
        found.append((placement, seconds))
    return found
