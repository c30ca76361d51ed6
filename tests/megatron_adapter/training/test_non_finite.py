"""On NaN or infinity a run stops by Megatron's rules and names iteration and layer."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest

from megatron_fssdp.records.loads import read_loads
from megatron_fssdp.testing.ranks import RankError

from ..training_run import TrainingRun, assert_equal, train, train_on_all_ranks, wrap

SHORT = "{EP2} --train-iters 5"
EP, FSSDP = "ep", "fssdp slots=2 overlap_degree=4"
DISABLED = "--rerun-mode disabled"
SPOILED_IN = 3
# Megatron's exit codes: the repeated iteration gave the same result, or another one.
AGAIN, ANOTHER = 16, 17


def spoil_experts(value: float) -> None:
    """Put a wrong number into rank 1's experts of layer 2 before an iteration."""
    from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime

    def begin_iteration(begin: Any, self: MoERuntime, *args: Any) -> None:
        begin(self, *args)
        if self.clock.iteration == SPOILED_IN and os.environ["RANK"] == "1":
            for parameters in self.layers[1].experts.parameters.values():
                parameters[0].data.view(-1)[0] = value

    wrap(MoERuntime, "begin_iteration", begin_iteration)


SPOIL_WITH_NAN, SPOIL_WITH_INFINITY = (partial(spoil_experts, float(value)) for value in ("nan", "inf"))


def spoil_once(place: str) -> None:
    """Make one output of a module of rank 1 NaN, of MoE layer 2 if it is one; later ones are correct."""
    spoiled = list[None]()

    def spoiling(forward: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        if not spoiled and _is_spoiled_iteration() and getattr(self, "layer_number", 2) == 2:
            spoiled.append(None)
            (output[0] if isinstance(output, tuple) else output).data.mul_(float("nan"))
        return output

    wrap(resolve_name(place), "forward", spoiling)


EMBEDDING = "megatron.core.models.common.embeddings.language_model_embedding:LanguageModelEmbedding"
MOE_LAYER = "megatron.core.transformer.moe.moe_layer:MoELayer"  # Megatron's own or ours


def spoil_gradients() -> None:
    """Make the gradient of the last layer's output NaN on rank 1."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    def spoiling(forward: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        output, bias = forward(self, *args, **kwargs)
        if _is_spoiled_iteration() and self.layer_number == 2:
            output.register_hook(lambda gradient: gradient * float("nan"))
        return output, bias

    wrap(MoELayer, "forward", spoiling)


def run_passes_twice() -> None:
    """Switch on Megatron's repetition of every iteration's passes, which its command line does not offer."""
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    def start_reporting(start: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **{**kwargs, "mode": RerunMode.REPORT_DETERMINISM_STATS})

    wrap(RerunStateMachine, "__init__", start_reporting)


def run_passes_twice_with_megatrons_resets() -> None:
    """As above, and only Megatron's ``zero_grad_buffer`` resets what an iteration has summed."""
    from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime

    run_passes_twice()
    MoERuntime.begin_passes = lambda self: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("strategy", "spoil"),
    [
        pytest.param(FSSDP, SPOIL_WITH_NAN, id="fssdp-NaN", marks=pytest.mark.slow),
        pytest.param(EP, SPOIL_WITH_INFINITY, id="ep-inf", marks=pytest.mark.slow),
    ],
)
def test_a_non_finite_expert_is_named_in_the_error(
    strategy: str, spoil: Callable[[], None], text_data: Path, tmp_path: Path
) -> None:
    # Megatron saves the spoiled model, for a rerun on another device.
    arguments = f"{SHORT} --save {tmp_path} --save-interval 100"
    runs = train_on_all_ranks(2, arguments, text_data, strategy=strategy, before=spoil)
    assert [run.exit_code for run in runs] == [AGAIN, AGAIN]
    line = _error(runs[1])
    assert f"on rank 1: iteration {SPOILED_IN}: MoE layer 2 made non-finite hidden states from finite" in line
    assert re.search(r"parameters of its experts \[[\d, ]+\], which this rank owns, are not finite", line)
    assert "No checkpoint has been completed" in line


@pytest.mark.parametrize(
    ("strategy", "spoil"),
    [
        pytest.param(EP, SPOIL_WITH_NAN, id="ep-NaN"),
        pytest.param(FSSDP, SPOIL_WITH_INFINITY, id="fssdp-inf", marks=pytest.mark.slow),
    ],
)
def test_no_rank_hangs_when_megatron_raises(
    strategy: str, spoil: Callable[[], None], text_data: Path
) -> None:
    with pytest.raises(RankError) as caught:
        train(2, f"{SHORT} {DISABLED}", text_data, strategy=strategy, before=spoil, grace_s=60)
    assert sorted(caught.value.ranks) == [0, 1]
    message = str(caught.value)
    assert f"[fssdp] error on rank 1: iteration {SPOILED_IN}: MoE layer 2 made non-finite" in message
    assert f"[fssdp] rank 1 stopped in iteration {SPOILED_IN}" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "finding"),
    [
        (partial(spoil_once, EMBEDDING), "already non-finite at the input of MoE layer 1"),
        (spoil_gradients, "layers were finite, but gradients are not finite: MoE layer 2 is the last"),
    ],
    ids=["embedding", "gradients"],
)
def test_non_finite_values_of_other_layers_are_located(
    spoil: Callable[[], None], finding: str, text_data: Path
) -> None:
    with pytest.raises(RankError, match=finding):
        train(2, f"{SHORT} {DISABLED}", text_data, strategy=FSSDP, before=spoil, grace_s=60)


def test_an_error_that_does_not_repeat_ends_as_in_megatron(text_data: Path, tmp_path: Path) -> None:
    arguments = f"{SHORT} --micro-batch-size 4"
    whole = train(2, arguments, text_data, strategy=FSSDP)
    results = []
    for strategy in ("none", FSSDP):
        journal = tmp_path / f"{strategy}.txt"
        tracking = f"{arguments} --result-rejected-tracker-filename '{journal}'"
        spoil = partial(spoil_once, MOE_LAYER)
        runs = train_on_all_ranks(2, tracking, text_data, strategy=strategy, before=spoil)
        assert [run.exit_code for run in runs] == [ANOTHER, ANOTHER]
        first, second = re.findall(r"rank=1 iteration=\d+ status=\S+ result=(\S+) ", journal.read_text())
        assert first == "nan"
        results.append(float(second))
        assert runs[1].losses == pytest.approx(whole.losses[: SPOILED_IN - 1], rel=1e-6)
    assert f"iteration {SPOILED_IN}: MoE layer 2 made non-finite hidden states" in _error(runs[1])
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def give_passes_up() -> None:
    """As Megatron's ``PagedStashRunner`` on an overflow: set gradients to zero, and run the passes again."""
    from megatron.training import training

    def train_step(step: Any, forward_step: Any, data: Any, model: Any, *others: Any, **options: Any) -> Any:
        *before, schedule = others[:4]

        def again(**given: Any) -> Any:
            read = [next(given["data_iterator"]) for _ in range(given["num_microbatches"])]
            schedule(**{**given, "data_iterator": iter(read)})
            for chunk in (*model, *model):  # A second call finds nothing to do.
                chunk.zero_grad_buffer()
            return schedule(**{**given, "data_iterator": iter(read)})

        return step(forward_step, data, model, *before, again, *others[4:], **options)

    wrap(training, "train_step", train_step)


@pytest.mark.parametrize(
    ("strategy", "more", "repeat"),
    [
        (FSSDP, "", run_passes_twice),
        (FSSDP, "{BATCH16}", run_passes_twice_with_megatrons_resets),
        (f"{FSSDP} rematerialize=true", "{BATCH16}", give_passes_up),
        pytest.param("flexmoe", "", give_passes_up, marks=pytest.mark.slow),
        pytest.param(f"{FSSDP} rematerialize=true", "", run_passes_twice, marks=pytest.mark.slow),
    ],
)
def test_a_repeated_iteration_leaves_no_trace(
    strategy: str, more: str, repeat: Callable[[], None], text_data: Path, tmp_path: Path
) -> None:
    """Plans follow from loads, so a repeated iteration must not count its loads twice."""
    runs, loads = [], []
    for name, before in (("once", None), ("twice", repeat)):
        recorded = f"{strategy} record_dir={tmp_path / name}"
        runs.append(train(2, f"{SHORT} {more}", text_data, strategy=recorded, before=before))
        loads.append(read_loads(tmp_path / name).counts_ILDE)
    assert_equal(runs[1], runs[0])
    np.testing.assert_array_equal(*loads)


def _error(run: TrainingRun) -> str:
    (line,) = [message for message in run.messages if message.startswith("[fssdp] error")]
    print("\n" + line)
    return line


def _is_spoiled_iteration() -> bool:
    from megatron.training.global_vars import get_args

    return os.environ["RANK"] == "1" and get_args().curr_iteration + 1 == SPOILED_IN
