"""Which schedules of Parm may be selected."""

from types import SimpleNamespace

import pytest
import torch

from megatron_fssdp.dispatchers.parm.schedule_selector import ScheduleSelector

from ..megatron_adapter.layer.small_config import moe_config


@pytest.mark.parametrize(
    "random", [{"moe_router_force_load_balancing": True}, {"moe_router_force_biased": 0.0}]
)
def test_ranks_that_draw_other_logits_do_not_share_their_tokens(random):
    """Under s2 they would have to route the same tokens alike; without s2 there is nothing to measure."""
    sizes = {"tp": 2, "expt_tp": 1, "ep": 2, "tp_dp_cp": 4}
    groups = {name: SimpleNamespace(size=lambda n=n: n, rank=lambda: 0) for name, n in sizes.items()}
    config = moe_config(2, 8, 4, **random)
    config.tensor_model_parallel_size, config.sequence_parallel = 2, False
    selector = ScheduleSelector("auto", config, SimpleNamespace(**groups))
    assert selector.of(torch.zeros(4, 1, 8)).schedule == "s1"
