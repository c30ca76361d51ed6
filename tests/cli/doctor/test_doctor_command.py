import json

import pytest

from tests.cli.doctor.machine_examples import pose

from ...launch.tiny_run import TINY
from ...support.python_process import python_output, run_python


@pytest.fixture
def doctor(command, monkeypatch):
    """Runs the command on a made-up machine: exit code, stdout, stderr."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def run(*arguments, machine=""):
        pose(monkeypatch, f"cores=4 {machine}")
        return command("doctor", *arguments)

    return run


def test_every_problem_has_a_line_and_the_exit_code_says_so(doctor):
    code, out, _ = doctor()
    assert code == 0
    assert "checks found no problem; a training can run on this machine" in out.splitlines()[-1]
    assert "/site-packages/[it]" in out, "brackets are not markup"
    code, out, _ = doctor(machine="torch=2.4.0 python=3.11.2")
    assert code == 1
    lines = out.splitlines()
    assert sum(line.startswith("problem: ") for line in lines) == 2
    assert any(line.startswith("problem: torch: ") and "pip install 'torch>=2.6'" in line for line in lines)
    assert lines[-1].startswith("problems: 2;")


def test_json_has_stable_keys(doctor, tmp_path):
    code, out, _ = doctor("--json", "--checkpoints", tmp_path)
    report = json.loads(out)
    assert code == 0
    assert report.keys() == {"plugin", "host", "ok", "findings"}
    assert report["ok"] is True
    for finding in report["findings"]:
        assert finding.keys() == {"name", "found", "verdict", "advice"}
        assert finding["verdict"] in ("ok", "note", "problem")
    assert report["findings"][-1]["name"] == "checkpoint folder"
    assert list(tmp_path.iterdir()) == []

    code, out, _ = doctor("--json", machine="megatron=")
    assert (code, json.loads(out)["ok"]) == (1, False)


def test_a_runs_ranks_and_its_checkpoint_folder_are_checked(doctor, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = doctor("--json", "--config", TINY)
    findings = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert code == 0
    assert findings["ranks"]["found"] == "4 on 4 CPU cores"
    folder = "runs/gpt_moe_tiny-fssdp/checkpoints: does not exist yet"
    assert findings["checkpoint folder"]["found"].startswith(folder)
    assert list(tmp_path.iterdir()) == []

    (tmp_path / "file").write_text("")
    config = tmp_path / "run.yaml"
    config.write_text(TINY.read_text().replace("training:\n", "training:\n  save: file\n"))
    code, out, _ = doctor("--config", config)
    assert code == 1
    assert "Not a directory" in out
    assert "training.save" in out

    config.write_text(TINY.read_text().replace("training:\n", "training:\n  save_checkpoints: false\n"))
    assert "checkpoint folder" not in doctor("--config", config)[1]


def test_under_torchrun_one_rank_per_machine_reports(doctor, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert doctor() == (0, "", "")


def test_the_command_imports_torch_and_megatron_late_and_an_old_python_can_read_it():
    code = (
        "import ast, sys\n"
        "from megatron_fssdp.cli import app\n"
        "from megatron_fssdp.cli.doctor import doctor_command\n"
        "from megatron_fssdp.cli.doctor.examination import examine_machine\n"
        "heavy = {'torch', 'megatron', 'transformer_engine', 'apex'} & set(sys.modules)\n"
        "if heavy: sys.exit(f'imported {heavy}')\n"
        "for name, module in list(sys.modules.items()):\n"
        "    if name.partition('.')[0] == 'megatron_fssdp':\n"
        "        ast.parse(open(module.__file__).read(), module.__file__, feature_version=(3, 11))\n"
    )
    python_output("-c", code)


def test_without_torch_and_megatron_the_command_still_answers(tmp_path):
    """Run in a fresh interpreter that can import neither package."""
    code = "import sys; sys.modules.update(torch=None, megatron=None); from megatron_fssdp.cli import app\n"
    code += "sys.argv = ['megatron-fssdp', 'doctor', '--json']; app.main()"
    done = run_python("-c", code, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    verdicts = {finding["name"]: finding["verdict"] for finding in json.loads(done.stdout)["findings"]}
    assert verdicts["torch"] == verdicts["Megatron"] == "problem"
    assert verdicts["GPUs"] == "note"
