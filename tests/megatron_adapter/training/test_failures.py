"""When a training fails, all ranks end, and a line says where; a repeated iteration leaves no trace."""

import os
import re
import signal
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core import rerun_state_machine as rerun
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.training.global_vars import get_args

from megatron_fssdp.megatron_adapter.training.training_hooks import how_to_go_on
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.records.loads import read_loads
from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime
from megatron_fssdp.strategies.fssdp.fssdp_strategy import FssdpStrategy
from megatron_fssdp.testing.ranks import RankError
from tests.support.random_placement import plain_transfer

from ..training_run import assert_equal, relative_difference, slow, train, train_on_all_ranks, wrap

SHORT = "{EP2} --train-iters 3"
NO_RERUN = f"{SHORT} --rerun-mode disabled"
FSSDP = "fssdp slots=2 overlap_degree=4"
FAILS_IN = 3  # the iteration; after the first save and the first re-shard, where there are any
REPEATED, ANOTHER = 16, 17  # Megatron's exit codes if a repeated iteration gave the same result, or another


def is_time(rank="1"):
    return os.environ["RANK"] == rank and get_args().curr_iteration + 1 == FAILS_IN


def spoil_experts(value):
    """Put a wrong number into rank 1's experts of layer 2 before an iteration."""

    def begin_iteration(begin, self, *args):
        begin(self, *args)
        for parameters in self.layers[1].local.experts.parameters.values() if is_time() else ():
            parameters[0].data.view(-1)[0] = value

    wrap(MoERuntime, "begin_iteration", begin_iteration)


def spoil_layer(spoil):
    """Call a function with rank 1's outputs of MoE layer 2, which is Megatron's own or ours."""

    def spoiling(forward, self, *args, **kwargs):
        output, bias = forward(self, *args, **kwargs)
        if is_time() and self.layer_number == 2:
            spoil(output)
        return output, bias

    wrap(MoELayer, "forward", spoiling)


def spoil_output():
    """Make one output NaN; later ones are correct."""
    spoiled = []
    spoil_layer(lambda output: spoiled or spoiled.append(output.data.mul_(float("nan"))))


def fail_twice():
    """Let Megatron find an iteration's result wrong, and the same when it repeats the iteration."""

    def inject(_, injector):
        injector.injected_error_type = rerun.RerunDiagnostic.CORRECT_RESULT
        return is_time()

    wrap(rerun.RerunErrorInjector, "maybe_inject", inject)


def spoil_gradients():
    spoil_layer(lambda output: output.register_hook(lambda gradient: gradient * float("nan")))


def plan_alone():
    def plan_without_replicas(before_gate, self, context, history):
        plan = before_gate(self, context, history)
        if not is_time() or context.layer != 2:
            return plan
        placement = ExpertPlacement.owners_only(context.owner_E, context.num_devices)
        return replace(plan, placement=placement, transfer=plain_transfer(placement))

    FssdpStrategy.shares_plans = False
    wrap(FssdpStrategy, "before_gate", plan_without_replicas)


# name: strategy, what happens, what all ranks' output says
STOPPED = {
    "NaN": ("ep", partial(spoil_experts, float("nan")), "NaN"),
    "plans that differ": (
        f"{FSSDP} FSSDP_CHECK_PLANS=1",
        plan_alone,
        # Layer 2 is planned while the rows of layer 1 travel.
        r"in the forward pass of MoE layer 1: RuntimeError: \[fssdp\] the plan of layer 2 in iteration 3 is "
        r"not the same on all 2 ranks: ranks \[1\]",
    ),
    "infinity": (FSSDP, partial(spoil_experts, float("inf")), ""),
    "gradients": (FSSDP, spoil_gradients, ""),
}


@pytest.mark.parametrize("name", [*list(STOPPED)[:2], *slow(list(STOPPED)[2:])])
def test_all_ranks_stop_and_name_the_place(name, text_data):
    strategy, before, said = STOPPED[name]
    with pytest.raises(RankError, match=said) as caught:
        train(2, NO_RERUN, text_data, strategy=strategy, before=before, grace_s=300)
    assert sorted(caught.value.ranks) == [0, 1]
    assert f"[fssdp] rank 1 stopped in iteration {FAILS_IN}" in str(caught.value)


def test_an_error_that_does_not_repeat_ends_as_in_megatron(text_data, tmp_path):
    arguments = f"{SHORT} --micro-batch-size 4"
    whole = train(2, f"{arguments} --train-iters {FAILS_IN - 1}", text_data, strategy=FSSDP)
    results = []
    for strategy in ("none", FSSDP):
        journal = tmp_path / f"{strategy}.txt"
        tracking = f"{arguments} --result-rejected-tracker-filename '{journal}'"
        runs = train_on_all_ranks(2, tracking, text_data, strategy=strategy, before=spoil_output)
        assert [run.exit_code for run in runs] == [ANOTHER, ANOTHER]
        first, second = re.findall(r"rank=1 iteration=\d+ status=\S+ result=(\S+) ", journal.read_text())
        assert first == "nan"
        results.append(float(second))
        assert runs[1].losses == pytest.approx(whole.losses, rel=1e-6)
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_an_error_that_repeats_is_saved_as_in_megatron(text_data, tmp_path):
    """Experts are away from home then, and the iteration has gradients."""
    arguments = "{EP2} --train-iters 4 --no-save-rng --no-load-rng"
    whole = train(2, arguments, text_data, strategy="none")
    saving = f"{arguments} --save {tmp_path} --save-interval 100 --ckpt-format torch_dist"
    moving = f"{FSSDP} reshard_interval=1"
    runs = train_on_all_ranks(2, saving, text_data, strategy=moving, before=fail_twice)
    assert [run.exit_code for run in runs] == [REPEATED, REPEATED]
    assert any("re-sharded" in message for message in runs[0].messages)
    # Megatron would insist on another device for the third attempt.
    resuming = f"{arguments} --load {tmp_path} --rerun-mode disabled"
    resumed = train(2, resuming, text_data, strategy="none")
    assert relative_difference(resumed.losses, whole.losses[FAILS_IN - 1 :]) <= 1e-6


def run_passes_twice():
    """Switch on Megatron's repetition of every iteration's passes, which its command line does not offer."""

    def start_reporting(start, self, *args, **kwargs):
        start(self, *args, **{**kwargs, "mode": rerun.RerunMode.REPORT_DETERMINISM_STATS})

    wrap(rerun.RerunStateMachine, "__init__", start_reporting)


@pytest.mark.parametrize("strategy", [FSSDP, *slow([f"{FSSDP} rematerialize=true", "flexmoe"])])
def test_a_repeated_iteration_leaves_no_trace(strategy, text_data, tmp_path):
    """Plans follow from loads, so a repeated iteration must not count its loads twice."""
    runs, loads = [], []
    for name, before in (("once", None), ("twice", run_passes_twice)):
        recorded = f"{strategy} record_dir={tmp_path / name}"
        runs.append(train(2, SHORT, text_data, strategy=recorded, before=before))
        loads.append(read_loads(tmp_path / name).counts_ILDE)
    assert_equal(runs[1], runs[0])
    np.testing.assert_array_equal(*loads)


def die_after(owner, name):
    """Kill rank 1 after the first call of a class's method in an iteration."""

    def and_die(method, *args, **kwargs):
        result = method(*args, **kwargs)
        if is_time():
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    wrap(resolve_name(owner), name, and_die)


CARGO = "megatron_fssdp.collectives.sparse.transfer_cargo"
GATHER = (f"{CARGO}:GatherCargo", "outgoing")
LAYER = "megatron_fssdp.megatron_adapter.layer.moe_layer:StrategyMoELayer"
WRITTEN = "megatron_fssdp.collectives.sparse.slot_exchange:SlotQuantity"
TRAINING = "{EP2} --train-iters 4 --save-interval 2 --no-save-rng --no-load-rng"
# When a rank has sent a piece of an expert or of a gradient, between gate and dispatch, and in a re-shard.
KILLED = {
    # The other rank can first fail in the exchange of the layer's token counts.
    "spAG": (GATHER, "", r", in .*MoE layer "),
    "spAG alone": (GATHER, "overlap=false", r", in .*SparseAllGather of layer "),
    "a re-shard": ((WRITTEN, "write"), "", r", in .*a re-shard"),
    "forward": ((LAYER, "route"), "", r", in .*the forward pass of MoE layer 1"),
    # The other rank can first fail in Megatron's own reduction.
    "spRS": ((f"{CARGO}:ReductionCargo", "outgoing"), "", r"(, in .*SparseReduceScatter of layer |: )"),
}


@pytest.mark.parametrize("name", ["spAG", *slow(list(KILLED)[1:])])
def test_after_a_killed_rank_the_other_ends_and_the_run_resumes(name, text_data, tmp_path):
    killed, more, place = KILLED[name]
    moving = f"{FSSDP} reshard_interval=2"
    whole = train(2, TRAINING, text_data, strategy=moving)
    options = {"strategy": f"{moving} {more}", "before": partial(die_after, *killed), "grace_s": 300}
    with pytest.raises(RankError) as caught:
        train(2, f"{TRAINING} --save {tmp_path}", text_data, **options)
    message = str(caught.value)
    assert caught.value.ranks == (1, 0), message  # both ranks ended by themselves
    assert "rank 1 was ended by signal 9" in message
    (line,) = re.findall(r"\[fssdp\] rank 0 stopped .*", message)
    assert re.match(rf"\[fssdp\] rank 0 stopped in iteration {FAILS_IN}{place}", line)
    assert f"The last complete checkpoint is of iteration 2: restart with --load {tmp_path}" in line
    resumed = train(2, f"{TRAINING} --load {tmp_path}", text_data, strategy=moving)
    assert relative_difference(resumed.losses, whole.losses[2:]) <= 1e-6


@pytest.mark.parametrize("content", [None, bytes(range(256))], ids=["missing", "damaged"])
def test_a_tracker_that_cannot_be_read_leads_to_the_next_folder(tmp_path, content):
    saved, loaded = (tmp_path / name / "latest_checkpointed_iteration.txt" for name in ("saved", "loaded"))
    for tracker, text in ((saved, content), (loaded, b"10\n")):
        tracker.parent.mkdir()
        if text is not None:
            tracker.write_bytes(text)
    args = SimpleNamespace(save=str(saved.parent), load=str(loaded.parent))
    wanted = f"The last complete checkpoint is of iteration 10: restart with --load {loaded.parent}"
    assert how_to_go_on(args) == wanted
    loaded.unlink()
    assert how_to_go_on(args).startswith("No checkpoint")
