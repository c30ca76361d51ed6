"""Iterations of a runtime: plans, histories, counts that arrive, disagreements, dropped transfers."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.transfer_lanes import PendingTransfer
from megatron_fssdp.runtime.clocks.layer_stopwatch import LayerStopwatch
from megatron_fssdp.runtime.experts.expert_layout import LocalExperts
from megatron_fssdp.runtime.layers.local_layer import LocalLayer
from megatron_fssdp.strategies.layer_plan import LayerPlan
from tests.support.training_preload import on_layer_ranks

from ..case_run import CaseRun
from ..drawn_placements import DrawnPlacements
from ..layer_case import LayerCase

CASE = LayerCase("runtime", num_nodes=1)


@on_layer_ranks(2)
def test_a_plan_lasts_an_iteration():
    run = CaseRun(CASE)
    slots, runtime, plans, measured = run.layers[0].slots, run.runtime, [], []
    slots.local.stopwatch = watch = LayerStopwatch()
    for _ in range(3):
        runtime.begin_iteration(2)
        plan = slots.passes.plan_iteration().plan
        for _ in range(2):
            run.forward(run.draw())[0].sum().backward()
            assert slots.passes.plan_iteration().plan is plan
        run.end()
        plans.append(plan.digest())
        measured.append(len(watch._experts))
    assert len(set(plans)) == 3
    assert measured == [2, 2, 4], "costs leave out the cold iteration"
    assert slots.history.num_seen == 3
    # The end of the iteration finds gradients that would be lost.
    runtime.begin_iteration(2)
    run.forward(run.draw())[0].sum().backward()
    with pytest.raises(RuntimeError, match="finish_gradients"):
        runtime.end_iteration()
    runtime.finish_gradients()
    runtime.end_iteration()
    assert slots.history.num_seen == 3, "counts that were not shared belong to no history"


@on_layer_ranks(2)
def test_only_a_training_pass_corrects_a_plan():
    run = CaseRun(replace(CASE, corrects=True))
    slots, runtime = run.layers[0].slots, run.runtime

    def evaluate():
        with runtime.evaluation(), torch.no_grad():
            run.forward(run.draw())

    evaluate()
    runtime.begin_iteration(2)
    planned = slots.passes.plan_iteration().plan
    evaluate()
    assert slots.passes.plan is planned
    assert planned.corrects
    run.forward(run.draw())[0].sum().backward()
    corrected = slots.passes.plan
    assert corrected is not planned
    evaluate()
    run.forward(run.draw())[0].sum().backward()
    assert slots.passes.plan is corrected
    runtime.finish_gradients()
    runtime.end_iteration()


class Withdraws(DrawnPlacements):
    """Its correction has no replicas."""

    def after_gate(self, context, counts_DE, plan, num_micro_batches):
        return LayerPlan.owners_only(context)


@on_layer_ranks(2)
def test_a_correction_without_replicas_frees_those_that_have_arrived():
    run = CaseRun(replace(CASE, corrects=True, placement="everywhere"), Withdraws)
    run.runtime.begin_iteration(1)
    gathered = run.layers[0].slots.passes.shared.transfers.slots
    run.forward(run.draw())[0].sum().backward()
    assert run.layers[0].slots.passes.shared.transfers is None
    assert not gathered.held_bytes
    run.end()


@on_layer_ranks(2)
def test_a_trace_names_what_a_layer_does():
    run = CaseRun(CASE)
    run.runtime.begin_iteration(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        run.forward(run.draw())[0].sum().backward()
        run.runtime.finish_gradients()
    names = {event.key for event in trace.key_averages()}
    assert {"fssdp plan", "fssdp remap", "fssdp gather weights", "fssdp reduce gradients"} <= names


class OwnersOnly(DrawnPlacements):
    def before_gate(self, context, history):
        return LayerPlan.owners_only(context)


class NeverReplicates(OwnersOnly):
    def may_replicate(self, layer):
        return False


@on_layer_ranks(2)
def test_gradients_are_late_wherever_another_copy_may_have_replicas():
    """Else ranks with copies of the same experts start their data-parallel reductions in different orders."""
    for strategy in (OwnersOnly, NeverReplicates):
        run = CaseRun(CASE, strategy)
        run.runtime.begin_iteration(1)
        run.forward(run.draw())[0].sum().backward()
        assert run.layers[0].slots.gradients.is_home == (strategy is NeverReplicates)
        run.runtime.finish_gradients()
        assert run.layers[0].slots.gradients.is_home


class RankDependent(DrawnPlacements):
    """A broken strategy: the plan of layer 2 depends on the rank, but the placement does not."""

    def before_gate(self, context, history):
        plan = LayerPlan.owners_only(context)
        differs = context.layer == 2 and dist.get_rank() == 2
        return replace(plan, dispatch_policy="owner" if differs else "even")


@on_layer_ranks(4)
def test_plans_that_differ_are_reported_on_all_ranks():
    """At the end of an iteration, without FSSDP_CHECK_PLANS."""
    run = CaseRun(replace(CASE, num_nodes=2), RankDependent, check_plans=False)
    run.runtime.begin_iteration(1, 7)
    # Tokens go where they should: these plans differ in nothing that shows without replicas.
    run.forward(run.draw())[0].sum().backward()
    run.runtime.finish_gradients()
    run.runtime.end_passes()
    said = r"plans of iteration 7: got other plans on ranks \[2\] of 4.*FSSDP_CHECK_PLANS=1"
    with pytest.raises(RuntimeError, match=said):
        run.runtime.end_iteration()


@on_layer_ranks(2)
def test_a_loop_that_gives_up_its_gradients_also_gives_up_its_counts():
    run = CaseRun(CASE)
    run.runtime.begin_iteration(1)
    run.forward(run.draw())[0].sum().backward()
    run.runtime.end_passes()
    run.runtime.reset_gradients()
    run.runtime.end_passes()
    assert not any(load.counts_DE.any() for load in run.runtime.end_iteration())


@on_layer_ranks(2)
def test_transfers_of_a_dropped_iteration_are_awaited():
    """Each way to drop an iteration waits for the second layer's weights, which travel in two parts."""
    awaited, original = [0], PendingTransfer.wait

    def counting(transfer):
        awaited[-1] += 1
        return original(transfer)

    for how in ("own", "reset_gradients", "begin_iteration"):
        run = CaseRun(replace(CASE, name=how, placement="everywhere", early=0.4))
        run.runtime.begin_iteration(1)
        run.layers[0].slots.launch(torch.ones(1))
        routing_map = torch.arange(8).expand(4, 8) < 2
        run.layers[0].forward(torch.ones(4, 5).double(), torch.ones(4, 8), routing_map)
        awaited.append(0)
        with mock.patch.object(PendingTransfer, "wait", counting):
            if how == "own":
                run.layers[1].move(run.layers[1].slots.local.context.owner_E)
            elif how == "reset_gradients":
                run.runtime.reset_gradients()
            else:
                run.runtime.begin_iteration(1)
        assert (run.layers[1].slots.passes.plan is None) == (how == "own")
    assert awaited[1:] == [2, 2, 2], "the first layer's weights have arrived"


@on_layer_ranks(2)
def test_parameters_that_do_not_fit_are_refused():
    local = CaseRun(CASE).layers[0].slots.local
    parameters = local.experts.parameters
    uneven = {**parameters, next(iter(parameters)): [torch.nn.Parameter(torch.zeros(3, 2))] * 2}
    mixed = {0: [torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)]}
    for experts, words in (
        ({}, "layer 7: got 0 expert layouts .*layout argument"),
        (uneven, "layer 7: got 2 expert layouts .*layout argument"),
        (mixed, "got dtypes .*bfloat16.*, wanted one"),
    ):
        with pytest.raises(ValueError, match=words):
            LocalLayer(local.context, local.groups, LocalExperts("layer 7", experts), local.strategy)
