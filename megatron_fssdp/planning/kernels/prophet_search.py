"""Kernel of Pro-Prophet's planner: the steps of its greedy search (Pro-Prophet, Alg. 1).

``planning/papers/prophet_planner.py`` prices the steps. The steps do not depend on their prices.

Shape letters: E experts, D devices, P pairs of expert and device.
"""

from megatron_fssdp.planning.native.kernel_types import Index, Int, Ints, ReadInts, ReadInts2, Real
from megatron_fssdp.planning.native.work_arrays import zero_ints


def greedy_steps(
    owner_E: ReadInts,
    load_E: ReadInts,
    counts_DE: ReadInts2,
    num_left_out: Index,
    tolerance: Real,
    left_D: Ints,
    computed_D: Ints,
    received_D: Ints,
    end_E: Ints,
    most_received_E: Ints,
    most_computed_E: Ints,
    expert_P: Ints,
    device_P: Ints,
) -> Index:
    """Send the most loaded experts of the most loaded devices to others, until the load is balanced.

    Args:
        owner_E: Owner of every expert, int64 ``[E]``.
        load_E: Inputs of every expert, int64 ``[E]``.
        counts_DE: Inputs by source device and expert, int64 ``[D, E]``.
        num_left_out: Number of devices to which a selected expert is not sent: those with the fewest inputs
            for it, and of equal ones those with the lowest numbers.
        tolerance: The load is balanced if the highest and the lowest load of a device differ by less.
        left_D: Replicas that each device may still get, int64 ``[D]``; changed in place.
        computed_D: Inputs that each device computes, int64 ``[D]``; changed in place.
        received_D: Inputs that each device receives, int64 ``[D]``; changed in place.
        end_E: Gets the number of replicas after each step, int64 ``[E]``.
        most_received_E: Gets the highest entry of ``received_D`` after each step, int64 ``[E]``.
        most_computed_E: Gets the highest entry of ``computed_D`` after each step, int64 ``[E]``.
        expert_P: Gets the experts of the replicas, in the order of the steps; int64 with room for ``E * D``.
        device_P: Gets the devices of the replicas, in the same order.

    Returns:
        Number of steps.
    """
    num_devices: Index = computed_D.shape[0]
    num_steps: Index = 0
    num_sent: Index = 0
    used_E: Ints = zero_ints(owner_E.shape[0])
    left_out_D: Ints = zero_ints(num_devices)  # the step in which a device was left out last
    while True:
        busiest: Index = 0
        idlest: Index = 0
        for device in range(num_devices):
            if computed_D[device] > computed_D[busiest]:
                busiest = device
            if computed_D[device] < computed_D[idlest]:
                idlest = device
        if computed_D[busiest] - computed_D[idlest] < tolerance:
            return num_steps
        selected: Index = 0
        most: Int = 0
        for expert in range(owner_E.shape[0]):
            if owner_E[expert] == busiest and used_E[expert] == 0 and load_E[expert] > most:
                selected = expert
                most = load_E[expert]
        if most == 0:
            return num_steps
        used_E[selected] = 1
        num_steps += 1
        for _ in range(num_left_out):
            fewest: Index = busiest
            for device in range(num_devices):
                if device == busiest or left_out_D[device] == num_steps:
                    continue
                if fewest == busiest or counts_DE[device, selected] < counts_DE[fewest, selected]:
                    fewest = device
            left_out_D[fewest] = num_steps
        for device in range(num_devices):
            if device == busiest or left_D[device] == 0 or left_out_D[device] == num_steps:
                continue
            tokens = counts_DE[device, selected]
            computed_D[device] += tokens
            computed_D[busiest] -= tokens
            received_D[busiest] -= tokens
            left_D[device] -= 1
            expert_P[num_sent] = selected
            device_P[num_sent] = device
            num_sent += 1
        most_received: Int = 0
        most_computed: Int = 0
        for device in range(num_devices):
            most_received = max(most_received, received_D[device])
            most_computed = max(most_computed, computed_D[device])
        end_E[num_steps - 1] = num_sent
        most_received_E[num_steps - 1] = most_received
        most_computed_E[num_steps - 1] = most_computed
