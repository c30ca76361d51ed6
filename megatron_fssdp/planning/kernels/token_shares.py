# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
# cython: infer_types=True, annotation_typing=False
"""Which of an expert's holders computes how many tokens, and what travels then."""


def share_evenly(
    counts_DE: memoryview,
    node_D: memoryview,
    first_E: memoryview,
    holder_P: memoryview,
    of_node: memoryview,
    tokens_ED: memoryview,
) -> None:
    """Write the tokens that the nearest holders compute in equal parts to ``tokens_ED``, which is 0.

    The holders of an expert, ``holder_P``, begin at ``first_E``. ``of_node``, ``[2, N]``, is overwritten.
    """
    for expert in range(tokens_ED.shape[0]):
        begin = first_E[expert]
        end = first_E[expert + 1]
        for node in range(of_node.shape[1]):
            of_node[0, node] = of_node[1, node] = 0.0
        for i in range(begin, end):
            of_node[0, node_D[holder_P[i]]] += 1.0
            tokens_ED[expert, holder_P[i]] = 1.0
        for device in range(tokens_ED.shape[1]):
            if tokens_ED[expert, device] == 0.0:
                of_node[1, node_D[device]] += counts_DE[device, expert]
        far = 0.0
        for node in range(of_node.shape[1]):
            if of_node[0, node] == 0.0:
                far += of_node[1, node]
            else:
                of_node[1, node] /= of_node[0, node]
        far /= end - begin
        for i in range(begin, end):
            device = holder_P[i]
            tokens_ED[expert, device] = counts_DE[device, expert] + (of_node[1, node_D[device]] + far)


def share_exactly(
    first_E: memoryview,
    holder_P: memoryview,
    total_E: memoryview,
    exponents: memoryview,
    of_device: memoryview,
    part_P: memoryview,
    tokens_ED: memoryview,
    any_holder: float,
    least_load: float,
) -> None:
    """Replace even tokens by those that level the loads of devices; ``token_dispatch.py`` says how.

    ``of_device``, ``[2, D]``, and ``part_P`` are overwritten.
    """
    total = 0.0
    for expert in range(total_E.shape[0]):
        total += total_E[expert]
        prior = (total_E[expert] + 1.0) * any_holder / (first_E[expert + 1] - first_E[expert])
        for i in range(first_E[expert], first_E[expert + 1]):
            part_P[i] = tokens_ED[expert, holder_P[i]] + prior
    scale = of_device.shape[1] / max(total, 1.0)
    for device in range(of_device.shape[1]):
        of_device[0, device] = 1.0
    for turn in range(exponents.shape[0] + 1):
        for device in range(of_device.shape[1]):
            of_device[1, device] = 0.0
        for expert in range(total_E.shape[0]):
            weighted = 0.0
            for i in range(first_E[expert], first_E[expert + 1]):
                weighted += part_P[i] * of_device[0, holder_P[i]]
            if turn == exponents.shape[0]:
                per_weight = total_E[expert] / weighted
                for i in range(first_E[expert], first_E[expert + 1]):
                    tokens_ED[expert, holder_P[i]] = part_P[i] * per_weight * of_device[0, holder_P[i]]
                continue
            per_weight = total_E[expert] * scale / weighted
            for i in range(first_E[expert], first_E[expert + 1]):
                of_device[1, holder_P[i]] += part_P[i] * per_weight
        if turn < exponents.shape[0]:
            for device in range(of_device.shape[1]):
                load = of_device[0, device] * (least_load + of_device[1, device])
                for _ in range(exponents[turn]):
                    of_device[0, device] /= load


def count_moves(
    counts_DE: memoryview,
    tokens_ED: memoryview,
    node_D: memoryview,
    of_node: memoryview,
    of_device: memoryview,
    busiest: memoryview,
) -> None:
    """Write the pairs on the busiest links, and all between nodes, to ``busiest``.

    These are the pairs on a link inside a node, of a device and of a node between nodes. ``of_node``,
    ``[2, N]``, is overwritten. ``of_device``, which is 0, gets the pairs that each device gets from its node
    and from others, and sends there, ``[4, D]``.
    """
    for expert in range(tokens_ED.shape[0]):
        for node in range(of_node.shape[1]):
            of_node[0, node] = of_node[1, node] = 0.0
        for device in range(tokens_ED.shape[1]):
            tokens, count = tokens_ED[expert, device], counts_DE[device, expert]
            if tokens > count:
                of_node[0, node_D[device]] += tokens - count
            else:
                of_node[1, node_D[device]] += count - tokens
        for node in range(of_node.shape[1]):
            near = min(of_node[0, node], of_node[1, node])
            of_node[0, node] = near / of_node[0, node] if near > 0.0 else 0.0
            of_node[1, node] = near / of_node[1, node] if near > 0.0 else 0.0
        for device in range(tokens_ED.shape[1]):
            tokens, count = tokens_ED[expert, device], counts_DE[device, expert]
            side = 0 if tokens > count else 1
            moved = tokens - count if side == 0 else count - tokens
            near = of_node[side, node_D[device]]
            of_device[2 * side, device] += moved * near
            of_device[2 * side + 1, device] += moved * (1.0 - near)
    for side in range(2):
        for node in range(of_node.shape[1]):
            of_node[side, node] = 0.0
        for device in range(of_device.shape[1]):
            near, far = of_device[2 * side, device], of_device[2 * side + 1, device]
            of_node[side, node_D[device]] += far
            busiest[0] = max(busiest[0], near)
            busiest[1] = max(busiest[1], far)
            busiest[3] += far if side == 1 else 0.0
        for node in range(of_node.shape[1]):
            busiest[2] = max(busiest[2], of_node[side, node])
