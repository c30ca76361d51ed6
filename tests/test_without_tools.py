"""Without the extra ``tools``, the launcher trains with a strategy from YAML; commands give a hint."""

import socket

from .megatron_adapter.training_run import TINY_GPT_MOE
from .support.python_process import ROOT, run_python

REFUSING = """
import sys

for name in ("Cython", "cython", "huggingface_hub", "jinja2", "markupsafe", "matplotlib", "plotly", "psutil",
             "rich", "tokenizers", "typer"):
    sys.modules[name] = None  # an import fails
"""
TRAINING = """
from megatron_fssdp.planning import compiled_form
from megatron_fssdp.megatron_adapter.entry.launcher import launch

compiled_form._why_plain = lambda name: "no compiler"
launch(sys.argv[1:])
"""
ARGUMENTS = f"{TINY_GPT_MOE} --disable-bias-linear --train-iters 2 --log-interval 1 --mock-data"


def run(code, *arguments, **variables):
    return run_python("-c", REFUSING + code, *arguments, PYTHONPATH=str(ROOT), **variables)


def test_the_launcher_trains_with_a_strategy_from_yaml(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        rank = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    rank |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    settings = tmp_path / "strategy.yaml"
    settings.write_text(f"record_dir: {tmp_path / 'records'}\n")
    words = [*ARGUMENTS.split(), "--moe-strategy", "fssdp", "--moe-strategy-config", str(settings)]
    done = run(TRAINING, "pretrain_gpt", *words, MEGATRON_FSSDP_DEVICE="cpu", OMP_NUM_THREADS="1", **rank)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "iteration        2/       2" in done.stdout
    assert (tmp_path / "records" / "metrics.jsonl").exists()


def test_a_command_says_what_to_install():
    done = run("sys.argv[1:] = ['--help']\nfrom megatron_fssdp.cli import main\nmain()")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "typer" in line
    assert "pip install 'megatron-fssdp[tools]'" in line
