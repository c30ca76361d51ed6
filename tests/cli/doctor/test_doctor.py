import errno
import os
from dataclasses import replace

import pytest
import torch

from megatron_fssdp.cli.doctor import devices, examination
from megatron_fssdp.cli.doctor.devices import Finding, check_folder, look_at_gpus
from megatron_fssdp.cli.doctor.examination import InstalledPackage, examine_machine, look_for
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.megatron_adapter.support import capabilities
from tests.cli.doctor.machine_examples import pose
from tests.support.tables import cells

# The machine, and a run's layout and device | a check | its verdict | words of what it found or advises.
# There are no other problems.
TABLE = """
    python=3.11.9 | Python | problem | wanted Python >=3.12
    torch=2.5.1 | torch | problem | pip install 'torch>=2.6'
    torch=source | torch | problem | pip install 'torch>=2.6'
    torch=2.6.0a0+ecf3bae.nv25.01 | torch | ok | 2.6.0a0+ecf3bae.nv25.01
    torch= nproc_per_node=2 | ranks | note | torch cannot be imported
    megatron= | Megatron | problem | pip install 'megatron-core>=0.19,<0.21'
    megatron=0.19.2!ImportError | Megatron | problem | fix the cause
    megatron=0.18.0 | Megatron | note | tested with megatron-core >=0.19,<0.21
    te=2.5.0!symbol gpus=8 | Transformer Engine | problem | imported: symbol
    megatron=0.21.0rc0 | Megatron | note | tested with megatron-core >=0.19,<0.21
    megatron=0.20.9+abc | Megatron | ok | 0.20.9+abc (/site-packages/[it])
    | Transformer Engine | ok | only needed on GPUs
    gpus=8 | Transformer Engine | note | TEGroupedMLP
    gpus=8 te=2.5.0+abc | Transformer Engine | ok | 2.5.0+abc
    gpus=8 nproc_per_node=8 context_parallel_size=2 | context parallelism | problem | install it
    gpus=8 | GPUs | ok | 8 × NVIDIA H100 80GB HBM3, 80.0 GiB
    gpus=8 MEGATRON_FSSDP_DEVICE=cpu | GPUs | note | not used
    gpus=RuntimeError:Xid | GPUs | problem | Xid
    | GPUs | note | none; ranks run on the CPU (2 CPU cores,
    MEGATRON_FSSDP_DEVICE=cuda | GPUs | problem | asks for them
    MEGATRON_FSSDP_DEVICE=gpu | GPUs | problem | 'gpu'
    build= | GPUs | problem | without CUDA
    build=13.0 | GPUs | problem | CUDA 13.0
    build=13.0 CUDA_VISIBLE_DEVICES= | GPUs | note | hidden
    nproc_per_node=2 | ranks | ok | 2 on 2 CPU cores
    nproc_per_node=4 | ranks | note | 4 on 2 CPU cores
    nproc_per_node=2 device=cuda | ranks | problem | 2 on 0 GPUs every rank needs its own GPU: use --set
    gpus=8 nproc_per_node=16 | ranks | problem | 16 on 8 GPUs
    gpus=8 nproc_per_node=4 device=cuda | ranks | note | 4 on 8 GPUs
    gpus=8 nproc_per_node=8 num_nodes=3 | ranks | ok | 2 other machines
    gpus=8 WORLD_SIZE=16 LOCAL_WORLD_SIZE=8 nproc_per_node=8 num_nodes=2 | ranks | ok | 8 on 8 GPUs
    gpus=8 WORLD_SIZE=8 nproc_per_node=8 num_nodes=2 | ranks | problem | has 16
    gpus=8 MEGATRON_FSSDP_DEVICE=cpu nproc_per_node=2 | ranks | ok | CPU cores
"""
ROWS = cells(TABLE)


def examine(monkeypatch, machine, *folders):
    layout = pose(monkeypatch, machine)
    run = None
    if layout:
        model = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8}
        training = {"train_iters": 1, "global_batch_size": 48, "device": layout.pop("device", "auto")}
        run = RunConfig.model_validate({"model": model, "training": training, "parallelism": layout})
    return {finding.name: finding for finding in examine_machine(run, folders)}


@pytest.mark.parametrize(("machine", "check", "verdict", "words"), ROWS)
def test_the_verdict_follows_from_the_machine(machine, check, verdict, words, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    findings = examine(monkeypatch, machine)
    assert findings[check].verdict == verdict
    assert words in f"{findings[check].found} {findings[check].advice}"
    problems = [name for name, finding in findings.items() if finding.verdict == "problem"]
    assert all(len(findings[name].advice.splitlines()) == 1 for name in problems)
    others = ["torch"] if "torch=" in machine.split() else []  # in a row about another check
    assert problems == ([check] if verdict == "problem" else others)


def test_the_report_has_all_checks_in_order(monkeypatch, tmp_path):
    names = "Python,torch,Megatron,Megatron's seams,Transformer Engine,strategies,planning kernels"
    names += ",gloo,NCCL,GPUs"
    assert ",".join(examine(monkeypatch, "")) == f"{names},variables"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(devices, "LEAST_FREE_BYTES", 0)
    findings = examine(monkeypatch, "gpus=8 te=2.5.0 nproc_per_node=8", ("--checkpoints", tmp_path))
    assert ",".join(findings) == f"{names},ranks,variables,checkpoint folder"
    assert {finding.verdict for finding in findings.values()} == {"ok"}
    assert findings["NCCL"].found == "2.30.7"


def test_torch_without_back_ends_is_a_problem(monkeypatch):
    for back_end in ("nccl", "gloo"):
        monkeypatch.setattr(torch.distributed, f"is_{back_end}_available", lambda: False)
    for machine, nccl in (("", "ok"), ("gpus=8", "problem")):
        findings = examine(monkeypatch, machine)
        assert (findings["gloo"].verdict, findings["NCCL"].verdict) == ("problem", nccl)


def test_the_gpus_of_this_machine_are_those_of_torch():
    assert len(look_at_gpus().models) == torch.cuda.device_count()


def test_a_package_that_fails_on_import_is_reported(tmp_path, monkeypatch):
    code = "__version__ = '1.0'\nraise OSError('libfoo.so.1:\\nnot found')"
    (tmp_path / "broken_thing.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    package = look_for("broken_thing", "broken-thing")
    assert (package.location, package.error, package.works) == (str(tmp_path), "OSError: libfoo.so.1:", False)
    assert look_for("no_such_parent.child", "no-such-thing") == InstalledPackage()
    assert look_for("json", "no-such-thing").works


def test_seams_are_found_and_missed_in_the_installed_megatron(monkeypatch):
    whole = examination.check_seams(True)
    assert int(whole.found.split()[1]) == int(whole.found.split()[3]) > 20

    monkeypatch.setattr(capabilities, "SEAMS", {"megatron.core.gone": "X Layer.route"})
    gone = examination.check_seams(True)
    assert gone.verdict == "problem"
    assert "; not megatron.core.gone.Layer.route (ModuleNotFoundError" in gone.found
    assert "pip install 'megatron-core>=0.19,<0.21'" in gone.advice

    def fail(name):
        raise RuntimeError("broken kernel")

    monkeypatch.setattr(capabilities.importlib, "import_module", fail)
    assert "RuntimeError: broken kernel" in examination.check_seams(True).found


def test_strategies_of_other_packages_are_named_and_broken_ones_are_notes(monkeypatch):
    entries = {"ep": STRATEGIES["ep"], "mine": replace(STRATEGIES["ep"], name="mine", package="my-package")}
    text = "brittle cannot be used: no module; pip uninstall brittle"
    registry = type("Found", (dict,), {"broken": {"lost": text}})
    monkeypatch.setattr(examination, "STRATEGIES", registry(entries))
    usable, broken = examination.check_strategies()
    assert usable == Finding("strategies", "1 from megatron-fssdp, mine from my-package")
    assert broken.verdict == "note"
    assert broken.found == "brittle cannot be used: no module"
    assert broken.advice.startswith("pip uninstall brittle")


def test_plain_kernels_are_a_note_with_the_next_step(monkeypatch):
    monkeypatch.setattr(examination, "kernel_form", lambda: "plain Python (not compiled)")
    plain = examination.check_kernels()
    assert (plain.verdict, plain.found) == ("note", "plain Python (not compiled)")
    assert "install a C compiler" in plain.advice


def test_a_folder_is_checked_by_writing_and_left_unchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "LEAST_FREE_BYTES", 0)
    assert ": writable, " in check_folder(tmp_path, "--checkpoints").found
    missing = check_folder(tmp_path / "a" / "b", "--checkpoints")
    assert missing.verdict == "ok"
    assert "can be created" in missing.found
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(devices, "LEAST_FREE_BYTES", 1 << 60)
    assert check_folder(tmp_path, "--checkpoints").verdict == "note"


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path, monkeypatch):
    def fill(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    paths = dict.fromkeys((tmp_path / "file", tmp_path / "file" / "below", tmp_path / "dangling"), "")
    for path, words in {**paths, tmp_path: "No space left"}.items():
        if words:
            monkeypatch.setattr(devices.os, "fsync", fill)
        finding = check_folder(path, "--checkpoints")
        assert finding.verdict == "problem"
        assert f"cannot be written ({words}" in finding.found
        assert "or set another folder with --checkpoints" in finding.advice
    assert len(list(tmp_path.iterdir())) == 2
