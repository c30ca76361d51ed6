# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
# cython: infer_types=True, annotation_typing=False
"""The steps of planners that place one expert after the other."""


def spill_below(
    load_E: memoryview,
    by_owner_E: memoryview,
    first_D: memoryview,
    busiest_first_D: memoryview,
    nearest_ED: memoryview,
    room_D: memoryview,
    left_D: memoryview,
    spilled: memoryview,
) -> int:
    """Spill the tokens of devices above a ceiling to the nearest devices with room.

    ``by_owner_E`` has the experts by owner, then by tokens, descending; those of a device begin at
    ``first_D``. Devices come by load, descending (``busiest_first_D``), and for each expert in the order in
    which its tokens spill to them. A device may still take ``room_D`` tokens, negative above the ceiling, and
    ``left_D`` experts.

    The result is the number of rows of ``spilled``, each an expert, a device and a number of tokens; or -1 if
    tokens find no room.
    """
    num = 0
    for i in range(room_D.shape[0]):
        busy = busiest_first_D[i]
        over = -room_D[busy]
        if over <= 0:
            break
        for j in range(first_D[busy], first_D[busy + 1]):
            expert = by_owner_E[j]
            left = min(over, load_E[expert])
            over -= left
            for k in range(room_D.shape[0]):
                if left == 0:
                    break
                device = nearest_ED[expert, k]
                taken = min(left, room_D[device])
                if taken > 0 and left_D[device] > 0:
                    spilled[num, 0] = expert
                    spilled[num, 1] = device
                    spilled[num, 2] = taken
                    num += 1
                    room_D[device] -= taken
                    left_D[device] -= 1
                    left -= taken
            over += left
        if over > 0:
            return -1
    return num


def greedy_steps(
    owner_E: memoryview,
    load_E: memoryview,
    inputs_ED: memoryview,
    fewest_first_ED: memoryview,
    computed_D: memoryview,
    received_D: memoryview,
    left_D: memoryview,
    is_selected_E: memoryview,
    replicas: memoryview,
    after: memoryview,
    tolerance: float,
    num_left_out: int,
) -> int:
    """Pro-Prophet's greedy search (Alg. 1) for one number of left-out devices; the result counts its steps.

    An expert has ``load_E`` inputs, ``inputs_ED`` by source device; ``fewest_first_ED`` has the devices in
    the order of these. Devices compute ``computed_D`` inputs, receive ``received_D`` and may still get
    ``left_D`` replicas. A selected expert is not sent to the ``num_left_out`` devices with the fewest inputs
    for it. The load is balanced if the loads of devices differ by less than ``tolerance``.

    ``replicas`` gets expert and device of each replica, and ``after`` a row for each step: replicas so far,
    the most inputs that a device receives and the most that one computes.
    """
    num_replicas = 0
    for step in range(after.shape[0]):
        owner = 0
        lowest = 0
        for device in range(computed_D.shape[0]):
            if computed_D[device] > computed_D[owner]:
                owner = device
            if computed_D[device] < computed_D[lowest]:
                lowest = device
        if computed_D[owner] - computed_D[lowest] < tolerance:
            return step
        selected = -1
        for expert in range(owner_E.shape[0]):
            if owner_E[expert] != owner or is_selected_E[expert] or load_E[expert] == 0:
                continue
            if selected < 0 or load_E[expert] > load_E[selected]:
                selected = expert
        if selected < 0:
            return step
        is_selected_E[selected] = 1
        num_passed = 0
        before = num_replicas
        for i in range(computed_D.shape[0]):
            device = fewest_first_ED[selected, i]
            if device == owner:
                continue
            num_passed += 1
            if num_passed > num_left_out and left_D[device] > 0:
                computed_D[device] += inputs_ED[selected, device]
                computed_D[owner] -= inputs_ED[selected, device]
                received_D[owner] -= inputs_ED[selected, device]
                left_D[device] -= 1
                replicas[num_replicas, 0] = selected
                replicas[num_replicas, 1] = device
                num_replicas += 1
        # Without room, further steps would change nothing but the number of selected experts.
        has_room = num_replicas > before
        for device in range(computed_D.shape[0]):
            has_room = has_room or left_D[device] > 0
            after[step, 1] = max(after[step, 1], received_D[device])
            after[step, 2] = max(after[step, 2], computed_D[device])
        if not has_room:
            return step
        after[step, 0] = num_replicas
    return after.shape[0]
