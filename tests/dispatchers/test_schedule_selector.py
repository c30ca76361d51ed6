"""Which schedules of Parm may be selected."""

from types import SimpleNamespace

import pytest
import torch

from megatron_fssdp.dispatchers.parm import schedule_selector
from megatron_fssdp.dispatchers.parm.schedule_selector import ScheduleSelector

from ..megatron_adapter.layer.small_config import moe_config


@pytest.fixture(autouse=True)
def nested_groups(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: range(group.size()))


@pytest.mark.parametrize(
    "random", [{"moe_router_force_load_balancing": True}, {"moe_router_force_biased": 0.0}]
)
def test_ranks_that_draw_other_logits_do_not_share_their_tokens(random):
    """Under s2 they would have to route the same tokens alike; without s2 there is nothing to measure."""
    assert selector_of(**random).of(torch.zeros(4, 1, 8)).schedule == "s1"


def test_ranks_with_sequences_of_other_lengths_measure_and_select_alike(monkeypatch):
    """Only those that exchange tokens: another expert-parallel group may have no passes."""
    lengths, seen = (4, 8), []
    shapes = [torch.Size((length, 1, 8)) for length in lengths]
    monkeypatch.setattr(schedule_selector, "of_all_ranks", lambda _, group: shapes[: 4 // group.size()])
    monkeypatch.setattr(schedule_selector, "measured_costs", lambda layer, *_: seen.append(layer))
    # S2 seems to be better for long sequences.
    monkeypatch.setattr(
        schedule_selector, "predicted_seconds", lambda layer, *_: {"s1": layer.num_tokens, "s2": 6.0}
    )
    for length in lengths:
        selector = selector_of()
        chosen = [selector.of(torch.zeros(number, 1, 8)).schedule for number in (length, *lengths)]
        assert chosen == ["s2"] * 3
    assert seen[0] == seen[1]


def selector_of(**options):
    sizes = {"tp": 2, "expt_tp": 1, "ep": 2, "tp_ep": 2, "tp_dp_cp": 4}
    groups = {name: SimpleNamespace(size=lambda n=n: n, rank=lambda: 0) for name, n in sizes.items()}
    config = moe_config(2, 8, 4, **options)
    config.tensor_model_parallel_size, config.sequence_parallel = 2, False
    return ScheduleSelector("auto", config, SimpleNamespace(**groups))
