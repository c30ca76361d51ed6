"""The launcher: `none` is stock Megatron, bad input gives one line, and foreign layers are refused."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_fssdp.megatron_adapter.experts import gradient_sync
from megatron_fssdp.megatron_adapter.layer import moe_layer
from megatron_fssdp.records.metrics import read_metrics
from tests.support.python_process import ROOT, run_python

from ..training_run import GPT, TINY_GPT_MOE, assert_equal, train, train_on_all_ranks, wrap

SHORT = "{EP2} --train-iters 2"


def test_strategy_none_equals_the_bare_script_bitwise(text_data):
    bare = train(2, SHORT, text_data, launcher=False)
    assert_equal(train(2, SHORT, text_data, before=forbid_the_plugins_layer), bare)


def forbid_the_plugins_layer():
    def refuse(*args, **kwargs):
        raise AssertionError("--moe-strategy none built or wrapped something")

    moe_layer.StrategyMoELayer.of = refuse
    gradient_sync._install = refuse


# Strategy and settings, Megatron's arguments, and words that the line has. test_limits.py has more of them.
BAD_INPUT = [("fsdp", "", "'fsdp' 'fssdp'"), ("fssdp nodes=3", "", "nodes: 3")]
BAD_INPUT += [("none", "--context-parallel-size 2", "--context-parallel-size: 2")]


@pytest.mark.parametrize(("strategy", "arguments", "named"), BAD_INPUT)
def test_bad_input_gives_one_line_before_process_groups_start(strategy, arguments, named, text_data):
    options = {"strategy": strategy, "env": {"WORLD_SIZE": "2"}}
    (run,) = train_on_all_ranks(1, f"{{EP2}} {arguments}", text_data, **options)
    assert run.exit_code == 2
    assert not run.losses
    lines = [line for line in run.errors.splitlines() if "[fssdp]" in line]
    assert len(lines) == 1, run.errors
    assert all(word in lines[0] for word in named.split())
    assert "Traceback" not in run.errors


def remove_a_seam():
    del MoELayer.postprocess


def build_other_layers():
    """Build the model from a spec that holds another class than Megatron's, as a fork might."""

    other = type("OtherLayer", (MoELayer,), {})

    def with_other_layer(stock, *args, **kwargs):
        return partial(other, submodules=stock(*args, **kwargs).keywords["submodules"])

    wrap(gpt_layer_specs, "get_moe_module_spec_for_backend", with_other_layer)


@pytest.mark.parametrize(
    ("num_ranks", "before", "message"),
    [
        (1, remove_a_seam, "without megatron.core.transformer.moe.moe_layer.MoELayer.postprocess"),
        (2, build_other_layers, "OtherLayer, wanted megatron.core.transformer.moe.moe_layer.MoELayer"),
    ],
)
def test_models_that_a_strategy_cannot_serve_are_refused(num_ranks, before, message, text_data):
    arguments = SHORT if num_ranks == 2 else ""
    runs = train_on_all_ranks(num_ranks, arguments, text_data, strategy="ep", before=before)
    assert [run.exit_code for run in runs] == [2] * num_ranks
    assert message in runs[0].errors


def test_a_script_can_register_the_plugin_itself(text_data, tmp_path):
    script = tmp_path / "pretrain.py"
    script.write_text(
        "import megatron_fssdp\n"
        "megatron_fssdp.register()\n"
        "megatron_fssdp.register()\n"  # changes nothing
        "from megatron_fssdp.pretraining.pretrain_gpt import main\n"
        "main()\n"
    )
    options = {"strategy": f"fssdp record_dir={tmp_path}", "launcher": False}
    launched = train(2, SHORT, text_data, strategy="fssdp")
    assert_equal(train(2, SHORT, text_data, model=replace(GPT, script=script), **options), launched)
    assert read_metrics(tmp_path)[1].layers[0].num_replicas > 0


@pytest.mark.slow
def test_bad_input_to_a_script_that_registers_itself_gives_one_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import megatron_fssdp\n"
        "megatron_fssdp.register()\n"
        "from megatron_fssdp.config.errors import ConfigurationError\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)\n"
        "raise ConfigurationError('slots: got -1, wanted a count')\n"
    )
    done = run_python(script)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "[fssdp] error on rank 0: slots: got -1, wanted a count"
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(
    "MEGATRON_LM_PATH" not in os.environ, reason="needs a Megatron-LM checkout (MEGATRON_LM_PATH)"
)
def test_an_unmodified_script_of_a_checkout_trains():
    script = Path(os.environ["MEGATRON_LM_PATH"]) / "pretrain_gpt.py"
    training = f"{TINY_GPT_MOE} --mock-data --train-iters 3 --log-interval 1 --moe-strategy fssdp"
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4, "-m", "megatron_fssdp")
    training = (*training.split(), "--expert-model-parallel-size", 4)
    done = run_python(*words, script, *training, cwd=ROOT, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "iteration        3/" in done.stdout
    assert "[fssdp] strategy fssdp: installed in 2 MoE layers" in done.stdout + done.stderr
