from dataclasses import replace

import pytest

from megatron_fssdp.planning.cost.cost_model import LinkCost
from megatron_fssdp.planning.cost.tensor_schedules import (
    ScheduledLayer,
    collectives_of,
    predicted_seconds,
    schedule_seconds,
)

# B·L = 100 tokens of M = 10 numbers of 4 bytes; k·f = 1.5: x = 4,000, E·T·M = 6,000, y = 12,000 bytes.
LAYER = ScheduledLayer(num_tokens=100, hidden_size=10, num_rows=150, n_mp=4, n_esp=2, n_ep=2)
SPLIT = replace(LAYER, is_split=True)


def sizes(schedule, layer):
    return [(call.kind, call.over, call.num_bytes) for call in collectives_of(schedule, layer)]


def test_schedules_have_the_collectives_of_the_papers_equations():
    to_experts, to_parts = ("all_to_all", "ep", 12000), ("all_to_all", "ep_esp", 3000)
    gather, reduce = ("all_gather", "esp", 8000), ("all_reduce", "esp", 12000)
    assert sizes("baseline", LAYER) == [gather, to_experts, reduce, to_experts]  # Eq. 1
    assert sizes("s1", LAYER) == [to_parts, to_parts, ("all_gather", "mp", 4000)]  # Eq. 11
    hidden = ("overlapped_all_to_all", "ep_esp", 3000)
    assert sizes("s2", LAYER) == [to_parts, hidden, ("all_gather", "mp", 6000)]  # Eq. 14
    two_steps = [("all_to_all", "ep", 1500), ("all_gather", "esp", 3000), ("reduce_scatter", "esp", 3000)]
    assert sizes("megatron", LAYER) == [*two_steps, two_steps[0], ("all_gather", "mp", 4000)]
    assert sizes("s2", replace(LAYER, n_mp=1)) == sizes("s1", replace(LAYER, n_mp=1))  # no MP, no S2
    # Sequence parallelism needs no final gather.
    assert sizes("s1", SPLIT) == sizes("s2", SPLIT) == sizes("s1", LAYER)[:2]
    assert sizes("megatron", SPLIT) == sizes("megatron", LAYER)[:-1]
    assert [size for *_, size in sizes("baseline", SPLIT)] == [2000, 3000, 3000, 3000]


def test_seconds_are_the_sum_of_each_collectives_alpha_and_beta():
    costs = {
        ("all_to_all", "ep_esp"): LinkCost(1.0, 0.001),
        ("overlapped_all_to_all", "ep_esp"): LinkCost(0.5, 0.0005),
        ("all_gather", "mp"): LinkCost(0.25, 0.0001),
    }
    assert schedule_seconds("s1", LAYER, costs) == pytest.approx(2 * (1 + 3) + 0.25 + 0.4)
    assert schedule_seconds("s2", LAYER, costs) == pytest.approx((1 + 3) + (0.5 + 1.5) + 0.25 + 0.6)
    predicted = predicted_seconds(LAYER, costs, ("baseline", "megatron", "s1", "s2"))
    assert list(predicted) == ["s1", "s2"], "the other schedules have unknown costs"
    assert predicted["s2"] < predicted["s1"]
