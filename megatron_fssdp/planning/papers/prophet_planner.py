"""Pro-Prophet's planner: it replicates the most loaded experts on a subset of the devices (Pro-Prophet, §IV).

Shape letters: E experts, D devices, P pairs of expert and device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.arrays import checked_counts
from megatron_fssdp.planning.kernels import prophet_search
from megatron_fssdp.planning.native.kernel import Kernel
from megatron_fssdp.planning.papers.prophet_model import ProphetModel
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.replica_sets import ReplicaSets

greedy_steps = Kernel(prophet_search.greedy_steps)

ROUNDING = 1e-9
"""More than the relative rounding error of modelled seconds."""


@dataclass(frozen=True, eq=False)
class PlannedLayers:
    """Results of several searches for one layer.

    Attributes:
        owner_E: Owner of every expert, int64 ``[E]``.
        num_devices: Number of devices, D.
        replicas: Replicas that each search has found.
        seconds: Modelled seconds of the layer after each search, with the counts from which it was planned.
        slots: Most replicas that a device may hold. None means no limit.
    """

    owner_E: np.ndarray
    num_devices: int
    replicas: ReplicaSets
    seconds: list[float]
    slots: int | None

    def placement(self, search: int) -> ExpertPlacement:
        """Owners and replicas of the experts after one of the searches.

        Args:
            search: Number of the search, from 0.
        """
        first, end = self.replicas.ends[search - 1] if search else 0, self.replicas.ends[search]
        present_ED = np.zeros((len(self.owner_E), self.num_devices), np.bool_)
        present_ED[np.arange(len(self.owner_E)), self.owner_E] = True
        present_ED[self.replicas.expert_P[first:end], self.replicas.device_P[first:end]] = True
        return ExpertPlacement(self.owner_E, present_ED, slots=self.slots)


def plan_layers(
    owner_E: np.ndarray,
    counts_DE: np.ndarray,
    model: ProphetModel,
    left_out: Sequence[int],
    *,
    balance: float = 0.5,
    slots: int | None = None,
) -> PlannedLayers:
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
        For each number, replicas whose modelled seconds are at most those without replicas.

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
    owner = np.ascontiguousarray(owner_E, np.int64)
    counts = checked_counts(counts_DE, num_devices, num_experts)
    load_E = counts.sum(axis=0)
    computed_D, own_D = (
        np.bincount(owner, weights=tokens_E, minlength=num_devices).astype(np.int64)
        for tokens_E in (load_E, counts[owner, np.arange(num_experts)])
    )
    received_D = computed_D - own_D
    plain_s = float(model.layer_s(received_D, computed_D, 0, 0))
    most_steps = _most_steps(model, load_E, left_out, plain_s)
    is_sorted_E, tables = np.zeros(num_experts, np.int64), np.empty((2, num_experts, num_devices), np.int64)

    def searched(most_steps: np.ndarray, num_replicas: int) -> tuple[np.ndarray, ...]:
        """Steps of each search, what is known after each step, and up to a number of replicas."""
        steps = np.empty(len(left_out), np.int64)
        after = np.empty((3, int(most_steps.sum())), np.int64)
        pairs = np.empty((2, num_replicas), np.int64)
        greedy_steps(
            owner,
            load_E,
            counts,
            np.array(left_out, np.int64),
            most_steps,
            balance * int(load_E.sum()) / num_experts,
            num_experts if slots is None else min(slots, num_experts),
            computed_D,
            received_D,
            is_sorted_E,
            *tables,
            steps,
            *after,
            *pairs,
        )
        return steps, *after[:, : int(steps.sum())], *pairs

    steps, num_sent, most_received, most_computed, *_ = searched(most_steps, 0)
    first_step = np.cumsum(steps) - steps
    number_of_step = np.arange(1, len(most_received) + 1) - np.repeat(first_step, steps)
    numbers_left_out = np.repeat(left_out, steps)
    step_s = model.step_s(most_received, most_computed, number_of_step, numbers_left_out)
    best_steps, sizes = np.zeros((2, len(left_out)), np.int64)
    seconds = [plain_s] * len(left_out)
    for search, (first, num_steps) in enumerate(zip(first_step.tolist(), steps.tolist(), strict=True)):
        if num_steps:
            best = first + int(step_s[first : first + num_steps].argmin())
            if step_s[best] < plain_s:
                best_steps[search], seconds[search] = best + 1 - first, float(step_s[best])
                sizes[search] = num_sent[best] - (num_sent[first - 1] if first else 0)
    # The replicas of other steps are not needed. In large groups, writing them would take most of the time.
    ends = np.cumsum(sizes)
    *_, expert_P, device_P = searched(best_steps, int(ends[-1]))
    return PlannedLayers(owner, num_devices, ReplicaSets(expert_P, device_P, ends), seconds, slots)


def _most_steps(
    model: ProphetModel, load_E: np.ndarray, left_out: Sequence[int], plain_s: float
) -> np.ndarray:
    """The most steps of each search that can pay, int64.

    With more steps, the layer would take longer than without replicas, even if these steps left no all-to-all
    and perfectly even loads: the seconds of transfers only grow with the steps.

    Args:
        model: The performance model of the layer.
        load_E: Inputs of every expert, int64 ``[E]``.
        left_out: The numbers of devices to which a selected expert is not sent.
        plain_s: Modelled seconds of the layer without replicas.
    """
    even_s = model.step_s(
        0.0,
        load_E.sum() / model.num_devices,
        np.arange(1, len(load_E) + 1),
        np.array(left_out)[:, None],
    )
    return np.asarray((even_s * (1 - ROUNDING) < plain_s).sum(axis=1))
