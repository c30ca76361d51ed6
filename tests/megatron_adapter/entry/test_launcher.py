"""The launcher: `none` is stock Megatron, bad input gives one line, and foreign layers are refused."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fssdp.megatron_adapter.support.tested_versions import requirement_of
from megatron_fssdp.reporting.records.run_records import read_metrics

from ..training_run import SCRIPT, TINY_GPT_MOE, flags, train, train_on_all_ranks

EP2 = "--expert-model-parallel-size 2 --train-iters 3"


def test_strategy_none_equals_the_bare_script_bitwise(text_data: Path) -> None:
    bare = train(2, EP2, text_data, launcher=False)
    none = train(2, EP2, text_data, before=forbid_the_plugins_layer)
    assert none.losses == bare.losses
    assert none.grad_norms == bare.grad_norms


def forbid_the_plugins_layer() -> None:
    """Fail when any part of a strategy is built."""
    from megatron_fssdp.megatron_adapter.experts import gradient_sync
    from megatron_fssdp.megatron_adapter.layer import moe_layer

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("--moe-strategy none built or wrapped something")

    moe_layer.StrategyMoELayer.__init__ = refuse  # type: ignore[method-assign]
    gradient_sync._install = refuse


SEQUENCE = "--tensor-model-parallel-size 2 --sequence-parallel"
PARTS = "--expert-tensor-parallel-size 2 --disable-bias-linear"


# Strategy and settings; Megatron's arguments; a part of the message.
@pytest.mark.parametrize(
    ("strategy", "arguments", "wanted"),
    [
        ("fsdp", "", "fssdp"),
        ("fssdp slot=2", "", "slots"),
        ("fssdp slots=many", "", "slots"),
        ("fssdp slots=9", "", "8"),
        ("fssdp slots=1 overlap_degree=0", "", "exclude"),
        ("fssdp", "--moe-strategy-config /no/such/file.yaml", "/no/such/file.yaml"),
        ("fssdp nodes=3", "", "nodes"),
        ("none slots=2", "", "slots"),
        ("ep", "--num-experts 7", "7 experts"),
        ("ep", "--cuda-graph-impl transformer_engine --cuda-graph-modules moe", "--cuda-graph-modules attn"),
        ("ep", "--expert-tensor-parallel-num-weight-shards 2", "remove --expert-tensor-parallel-num-weight"),
        ("ep", SEQUENCE, "--disable-bias-linear"),
        ("ep", f"{SEQUENCE} --expert-tensor-parallel-size 1", "biases of experts under sequence parallelism"),
        ("ep", "--moe-paged-stash", "--moe-paged-stash"),
        ("ep smart_schedule=by_price", PARTS, "it needs whole experts: use smart_schedule=false or"),
        ("ep smart_schedule=true group_size=3", "", "wanted a divisor of the 2 expert-parallel ranks"),
        (
            "smartmoe",
            "--num-experts 2",
            "--moe-strategy smartmoe: every device owns one expert",
        ),
        ("none", "--context-parallel-size 2", "Transformer Engine"),
    ],
)
def test_bad_input_gives_one_line_before_process_groups_start(
    strategy: str, arguments: str, wanted: str, text_data: Path
) -> None:
    arguments = f"--expert-model-parallel-size 2 {flags(strategy)} {arguments}"
    (run,) = train_on_all_ranks(1, arguments, text_data, env={"WORLD_SIZE": "2"})
    assert run.exit_code == 2
    assert not run.losses
    lines = [line for line in run.errors.splitlines() if "[fssdp]" in line]
    assert len(lines) == 1, run.errors
    assert wanted in lines[0]
    assert "Traceback" not in run.errors


def test_a_model_without_experts_is_refused(text_data: Path) -> None:
    (run,) = train_on_all_ranks(1, "--moe-strategy ep", text_data, before=drop_experts)
    assert run.exit_code == 2
    assert "--num-experts" in run.errors


def drop_experts() -> None:
    """Take the number of experts off the command line."""
    from megatron.training import arguments

    parse = arguments.parse_args

    def parse_args(*args: Any, **kwargs: Any) -> Any:
        parsed = parse(*args, **kwargs)
        parsed.num_experts = None
        return parsed

    arguments.parse_args = parse_args


def test_an_unsupported_megatron_is_refused_with_the_tested_range(text_data: Path) -> None:
    (run,) = train_on_all_ranks(1, "--moe-strategy ep", text_data, before=remove_a_seam)
    assert run.exit_code == 2
    assert "MoELayer.postprocess" in run.errors
    assert requirement_of("megatron-core") in run.errors


def remove_a_seam() -> None:
    """Make Megatron look like a release that lacks something."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    del MoELayer.postprocess


def test_models_without_the_strategys_layers_are_refused(text_data: Path) -> None:
    runs = train_on_all_ranks(2, f"{EP2} --moe-strategy ep", text_data, before=build_stock_layers)
    assert [run.exit_code for run in runs] == [2, 2]
    assert "not the strategy's" in runs[0].errors


def build_stock_layers() -> None:
    """Build the model from a spec that holds Megatron's own class, as a fork might."""
    from functools import partial

    from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs
    from megatron.core.transformer.moe.moe_layer import MoELayer

    stock = moe_module_specs.get_moe_module_spec_for_backend

    def with_stock_layer(*args: Any, **kwargs: Any) -> Any:
        built = stock(*args, **kwargs)
        return partial(MoELayer, submodules=built.keywords["submodules"])

    gpt_layer_specs.get_moe_module_spec_for_backend = with_stock_layer


def test_the_spec_option_builds_the_strategys_layers(text_data: Path) -> None:
    plain = train(2, f"{EP2} --moe-strategy fssdp", text_data)
    spec = "--spec megatron_fssdp get_gpt_decoder_block_spec"
    assert train(2, f"{EP2} --moe-strategy fssdp {spec}", text_data).losses == plain.losses


@pytest.mark.parametrize("launcher", [True, False])
def test_a_script_can_register_the_plugin_itself_once(
    launcher: bool, text_data: Path, tmp_path: Path
) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text(
        "import megatron_fssdp\n"
        "megatron_fssdp.register()\n"
        "try:\n"
        "    megatron_fssdp.register()\n"
        "except RuntimeError as error:\n"
        "    assert 'called twice' in str(error)\n"
        "else:\n"
        "    raise AssertionError('registered twice')\n"
        "from megatron_fssdp.cli.pretraining.pretrain_gpt import main\n"
        "main()\n"
    )
    arguments = f"{EP2} {flags('fssdp', record_dir=tmp_path)}"
    own = train(2, arguments, text_data, script=script, launcher=launcher)
    assert own.losses == train(2, f"{EP2} --moe-strategy fssdp", text_data).losses
    assert read_metrics(tmp_path)[2].layers[0].num_replicas > 0


@pytest.mark.slow
def test_bad_input_to_a_script_that_registers_itself_gives_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import megatron_fssdp\n"
        "megatron_fssdp.register()\n"
        "from megatron_fssdp.config.errors import ConfigurationError\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)\n"
        "raise ConfigurationError('slots: got -1, wanted a count')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "[fssdp] error on rank 0: slots: got -1, wanted a count"
    assert "Traceback" not in done.stderr


def test_a_missing_script_is_refused_by_the_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fssdp", "no_such_script.py"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "no_such_script.py" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(
    "MEGATRON_LM_PATH" not in os.environ, reason="needs a Megatron-LM checkout (MEGATRON_LM_PATH)"
)
def test_an_unmodified_script_of_a_checkout_trains() -> None:
    script = Path(os.environ["MEGATRON_LM_PATH"]) / "pretrain_gpt.py"
    training = f"{TINY_GPT_MOE} --mock-data --train-iters 3 --log-interval 1 --moe-strategy fssdp"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
            *("-m", "megatron_fssdp", str(script), *training.split(), "--expert-model-parallel-size", "4"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=SCRIPT.parents[1],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "iteration        3/" in done.stdout
    assert "[fssdp] strategy fssdp: installed in 2 MoE layers" in done.stdout + done.stderr
