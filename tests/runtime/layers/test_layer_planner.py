"""Plans that one rank makes for all: who is asked, what arrives, and what a failure does."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.runtime.layers.layer_planner import LayerPlanner
from tests.support.training_preload import on_layer_ranks

from ..case_run import CaseRun
from ..drawn_placements import DrawnPlacements
from ..layer_case import LayerCase

CASE = LayerCase("shared", num_nodes=1, num_layers=5, num_experts=6, schedule="FB")


class Shared(DrawnPlacements):
    """Notes for which layers it is asked, and can fail."""

    def __init__(self, case):
        super().__init__(case)
        self.shares_plans, self.asked, self.fails_at, self.holds = True, [], 0, None

    def before_gate(self, context, history):
        self.asked.append(context.layer)
        if context.layer == self.fails_at:
            error = ValueError("no plan for this layer")
            error.cause = self.holds
            raise error
        return super().before_gate(context, history)


def iterate(run):
    run.runtime.begin_iteration(1)
    run.forward(run.draw())[0].sum().backward()
    digests = [layer.slots.passes.shared.digest for layer in run.layers]
    run.end()
    return digests


@on_layer_ranks(2)
def test_a_layer_is_planned_by_one_rank_for_all():
    own = list(range(1 + dist.get_rank(), 6, 2))
    run = CaseRun(CASE, Shared, check_plans=False)
    iterate(run)
    assert run.strategy.asked == [1, 2, 3, 4, 5], "without loads, every rank plans"
    alone = Shared(CASE)
    for _ in range(2):
        run.strategy.asked.clear()
        run.layers[4].move(run.layers[4].slots.local.context.owner_E[::-1].copy())
        slots = [layer.slots for layer in run.layers]
        wanted = [alone.before_gate(layer.local.context, layer.history).digest() for layer in slots]
        assert iterate(run) == wanted
        assert run.strategy.asked == own
    # An evaluation shares as well, and the next iteration has its plans.
    run.strategy.asked.clear()
    with run.runtime.evaluation():
        pass
    with run.runtime.evaluation():
        run.forward(run.draw())
    iterate(run)
    assert sorted(run.strategy.asked) == own
    run.runtime.drop_plans()
    if dist.get_rank() == 0:  # A capture sends no messages, so one rank alone can make it.
        captured = mock.Mock(return_value=True)
        slots = run.layers[1].slots
        with mock.patch.multiple(torch.cuda, is_available=captured, is_current_stream_capturing=captured):
            with pytest.raises(RuntimeError, match="at least one warm-up"):
                slots.prepare_capture(training=True)
            captured.return_value = False
            slots.prepare_capture(training=True)
            captured.return_value = True
            slots.prepare_capture(training=True)
            with pytest.raises(RuntimeError, match="at least one warm-up"):
                slots.prepare_capture(training=False)
        assert run.layers[1].slots.passes.plan == run.layers[1].slots.local.context.owners_only
    run.strategy.fails_at = 2
    with pytest.raises(ValueError, match="no plan for this layer"):
        iterate(run)
    run.strategy.holds = (nothing for nothing in ())  # No message can have it.
    run.runtime.reset_gradients()
    fails_here = dist.get_rank() == 1
    with pytest.raises(ValueError if fails_here else RuntimeError, match="no plan for this layer"):
        iterate(run)


@on_layer_ranks(2)
def test_messages_may_have_any_length():
    plans = LayerPlanner(dist.group.WORLD)
    for lengths in ((3, 5), (4, 70_000), (4096, 131_073), (0, 2)):
        own = bytes([dist.get_rank()]) * lengths[dist.get_rank()]
        assert plans._gather(own, torch.device("cpu")) == [bytes([r]) * n for r, n in enumerate(lengths)]
