"""The doctor's findings on made-up machines and on this one."""

import errno
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES, BrokenStrategy
from megatron_fssdp.megatron_adapter.diagnosis import checkpoint_folder, devices, packages
from megatron_fssdp.megatron_adapter.diagnosis.checkpoint_folder import check_folder
from megatron_fssdp.megatron_adapter.diagnosis.devices import Gpus, check_devices, look_at_gpus
from megatron_fssdp.megatron_adapter.diagnosis.examination import examine_machine
from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict
from megatron_fssdp.megatron_adapter.diagnosis.packages import (
    InstalledPackage,
    check_apex,
    check_megatron,
    check_python,
    check_torch,
    check_transformer_engine,
    look_for,
)
from megatron_fssdp.megatron_adapter.support import capabilities
from tests.megatron_adapter.diagnosis.machine_examples import (
    EIGHT_GPUS,
    HERE,
    NOTE,
    OK,
    PROBLEM,
    pose,
    verdicts,
)
from tests.megatron_adapter.diagnosis.machine_examples import (
    NO_GPUS as CPU,
)

NO_TORCH = InstalledPackage("0.19.2", HERE, "ModuleNotFoundError: No module named 'torch'")


def a_run(device: str = "auto", **parallelism: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8},
            "training": {"train_iters": 1, "global_batch_size": 48, "device": device},
            "parallelism": parallelism,
        }
    )


def finding_on(name: str, gpus: Gpus, run: RunConfig | None = None) -> Finding:
    return next(each for each in check_devices(gpus, run, has_engine=False) if each.name == name)


# The report as a whole.


def test_a_healthy_cpu_machine_has_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    pose(monkeypatch)
    findings = verdicts(examine_machine())
    assert list(findings) == [
        "Python",
        "torch",
        "Megatron",
        "Megatron's seams",
        "Transformer Engine",
        "Apex",
        "strategies",
        "planning kernels",
        "gloo",
        "NCCL",
        "GPUs",
        "topology",
        "variables",
    ]
    assert [name for name, verdict in findings.items() if verdict is not OK] == ["GPUs"]


def test_a_machine_with_gpus_and_everything_else_is_ok_throughout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pose(monkeypatch, gpus=EIGHT_GPUS, engine=InstalledPackage("2.5.0", HERE))
    monkeypatch.setattr(checkpoint_folder, "LEAST_FREE_BYTES", 0)
    findings = verdicts(examine_machine(a_run(nproc_per_node=8), [("--checkpoints", tmp_path)]))
    assert set(findings.values()) == {OK}
    assert {"ranks", "checkpoint folder"} <= findings.keys()


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"python": "3.11.9"}, {"Python"}),
        ({"torch": InstalledPackage("2.5.1", HERE)}, {"torch"}),
        ({"megatron": InstalledPackage()}, {"Megatron"}),
        ({"megatron": InstalledPackage("0.22.0", HERE)}, set()),  # the verdict depends on its seams
        ({"variables": {"MEGATRON_FSSDP_DEVICE": "cuda"}}, {"GPUs"}),
        ({"variables": {"WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "8"}}, {"topology"}),
        # Without torch, the rest is still reported.
        ({"torch": InstalledPackage(), "megatron": NO_TORCH}, {"torch", "Megatron"}),
    ],
)
def test_one_fault_is_one_problem(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], problems: set[str]
) -> None:
    pose(monkeypatch, **changes)
    found = verdicts(examine_machine())
    assert {name for name, verdict in found.items() if verdict is PROBLEM} == problems
    assert "topology" in found


def test_an_incomplete_transformer_engine_is_one_problem_and_megatron_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = "RuntimeError: Found empty `transformer-engine` meta package installed."
    broken = InstalledPackage("0.19.2", HERE, error, broken_by="Transformer Engine")
    pose(monkeypatch, engine=InstalledPackage("2.5.0", HERE), megatron=broken)
    findings = {finding.name: finding for finding in examine_machine()}
    assert [name for name, one in findings.items() if one.verdict is PROBLEM] == ["Transformer Engine"]
    engine = findings["Transformer Engine"]
    assert f"({HERE}) is installed, but cannot be imported: RuntimeError" in engine.found
    assert "wanted a complete installation or none" in engine.advice
    assert "because of Transformer Engine" in findings["Megatron"].found
    apex = check_megatron(replace(broken, broken_by="Apex"))
    assert apex.verdict is PROBLEM, "the check of Apex does not import it"


@pytest.mark.parametrize(("verdict", "advice"), [(PROBLEM, ""), (NOTE, "one line\nand another")])
def test_a_problem_has_advice_of_one_line(verdict: Verdict, advice: str) -> None:
    with pytest.raises(ValueError, match="advice"):
        Finding("x", "y", verdict, advice)


# Versions and packages.


@pytest.mark.parametrize(
    ("finding", "verdict", "words"),
    [
        (check_python("3.10.2", "/usr/bin/python3"), PROBLEM, "wanted Python >=3.12"),
        (check_torch(InstalledPackage("2.4.0", HERE)), PROBLEM, "pip install 'torch>=2.6'"),
        (check_megatron(InstalledPackage()), PROBLEM, "pip install 'megatron-core>=0.19,<0.21'"),
        (check_megatron(InstalledPackage("0.19.2", HERE, "ImportError: libx")), PROBLEM, "fix the cause"),
        (check_megatron(InstalledPackage("0.18.0", HERE)), NOTE, "megatron-core >=0.19,<0.21"),
        (check_megatron(InstalledPackage(location=HERE)), NOTE, "compare the first losses"),
        (check_megatron(InstalledPackage("0.20.0", HERE)), OK, ""),
        (check_transformer_engine(InstalledPackage(), False), OK, ""),
        (check_transformer_engine(InstalledPackage(), True), NOTE, "TEGroupedMLP"),
        (check_transformer_engine(InstalledPackage("2.5.0+abc", HERE), True), OK, ""),
        (check_transformer_engine(InstalledPackage("1.13.0", HERE), True), NOTE, "wanted >=2.1"),
        (check_transformer_engine(InstalledPackage("2.5.0", HERE, "symbol"), True), PROBLEM, "remove all"),
    ],
)
def test_the_verdict_on_a_package_follows_from_its_installation(
    finding: Finding, verdict: Verdict, words: str
) -> None:
    assert finding.verdict is verdict
    assert words in finding.advice


def test_an_unrelated_apex_is_told_from_nvidias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    unrelated = check_apex()
    assert unrelated.verdict is NOTE
    assert f"unrelated package from the registry ({package})" in unrelated.found
    assert "pip uninstall apex" in unrelated.advice
    (package / "normalization").mkdir()
    assert "without its CUDA extensions" in check_apex().found


def test_a_package_that_fails_on_import_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_thing.py").write_text(
        "__version__ = '1.0'\nraise OSError('libfoo.so.1:\\nnot found')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = look_for("broken_thing", "broken-thing")
    assert (found.location, found.error, found.works) == (tmp_path, "OSError: libfoo.so.1:", False)
    assert look_for("no_such_parent.child", "no-such-thing") == InstalledPackage()
    assert look_for("json", "no-such-thing").works


# Seams, strategies, kernels.


def test_seams_are_found_and_missed_in_the_installed_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = packages.check_seams(True)
    assert int(whole.found.split()[1]) == int(whole.found.split()[3]) > 20

    gone = capabilities.Seam("megatron.core.gone", "X", "does something", "something", is_optional=True)
    route = capabilities.Seam("megatron.core.gone", "Layer.route", "does something", "every run")
    monkeypatch.setattr(capabilities, "SEAMS", (route, gone))
    _, needed, optional = packages.check_seams(True)
    assert (needed.name, needed.verdict) == ("seam Layer.route", PROBLEM)
    assert "not in megatron.core.gone (ModuleNotFoundError" in needed.found
    assert "does something, for every run" in needed.advice
    assert "pip install 'megatron-core>=0.19,<0.21'" in needed.advice
    assert (optional.name, optional.verdict) == ("seam X", NOTE)


def test_a_module_of_megatron_that_raises_is_a_missing_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("broken kernel")

    monkeypatch.setattr(capabilities.importlib, "import_module", fail)
    count, *missing = packages.check_seams(True)
    assert count.found.startswith(f"found 0 of {len(missing)} ")
    assert "RuntimeError: broken kernel" in missing[0].found


def test_strategies_of_other_packages_are_named_and_broken_ones_are_notes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = {"ep": STRATEGIES["ep"], "mine": replace(STRATEGIES["ep"], name="mine", package="my-package")}
    found = type("Found", (dict,), {"broken": {"lost": BrokenStrategy("lost", "brittle", "no module")}})
    monkeypatch.setattr(packages, "STRATEGIES", found(entries))
    usable, broken = packages.check_strategies()
    assert usable == Finding("strategies", "1 from megatron-fssdp, mine from my-package")
    assert broken.verdict is NOTE
    assert "brittle, cannot be used: no module" in broken.found
    assert "pip uninstall brittle" in broken.advice


def test_plain_kernels_are_a_note_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "kernel_form", lambda: "plain Python (not compiled)")
    plain = packages.check_kernels()
    assert (plain.verdict, plain.found) == (NOTE, "plain Python (not compiled)")
    assert "install a C compiler" in plain.advice


# Devices and ranks.


def test_the_verdict_on_back_ends_follows_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    assert finding_on("NCCL", EIGHT_GPUS) == Finding("NCCL", "2.30.7")
    assert finding_on("gloo", CPU).verdict is OK
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert finding_on("NCCL", CPU).verdict is OK
    assert finding_on("NCCL", EIGHT_GPUS).verdict is PROBLEM
    assert finding_on("gloo", CPU).verdict is PROBLEM


@pytest.mark.parametrize(
    ("gpus", "build", "has_driver", "variables", "verdict", "words"),
    [
        (EIGHT_GPUS, "13.0", True, {}, OK, "8 × NVIDIA H100 80GB HBM3, 80.0 GiB"),
        (EIGHT_GPUS, "13.0", True, {"MEGATRON_FSSDP_DEVICE": "cpu"}, NOTE, "not used"),
        (Gpus(error="RuntimeError: Xid"), "13.0", True, {}, PROBLEM, "Xid"),
        (CPU, None, False, {}, NOTE, "none; ranks run on the CPU (2 CPU cores, "),
        (CPU, None, False, {"MEGATRON_FSSDP_DEVICE": "cuda"}, PROBLEM, "asks for them"),
        (CPU, None, False, {"MEGATRON_FSSDP_DEVICE": "gpu"}, PROBLEM, "'gpu'"),
        (CPU, None, True, {}, PROBLEM, "without CUDA"),
        (CPU, "13.0", True, {}, PROBLEM, "CUDA 13.0"),
        (CPU, "13.0", True, {"CUDA_VISIBLE_DEVICES": ""}, NOTE, "hidden"),
        (CPU, None, True, {"MEGATRON_FSSDP_DEVICE": "cpu"}, NOTE, "none"),
    ],
)
def test_the_verdict_on_gpus_follows_from_the_machine(
    monkeypatch: pytest.MonkeyPatch,
    gpus: Gpus,
    build: str | None,
    has_driver: bool,
    variables: dict[str, str],
    verdict: Verdict,
    words: str,
) -> None:
    pose(monkeypatch, variables=variables)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(devices, "_NVIDIA_DRIVER", Path("/" if has_driver else "/no/such/driver"))
    finding = finding_on("GPUs", gpus)
    assert finding.verdict is verdict
    assert words in finding.found


@pytest.mark.parametrize(
    ("gpus", "launch", "cut", "verdict", "found"),
    [
        (EIGHT_GPUS, (), None, OK, "1 node (this machine) of 8 GPUs"),
        (CPU, (), None, OK, "1 node (this machine) of CPU ranks"),
        (EIGHT_GPUS, (16, 8), None, OK, "2 nodes of 8 ranks, from torchrun"),
        (EIGHT_GPUS, (20, 8), None, PROBLEM, "3 nodes of 8/8/4 ranks, from torchrun"),
        (EIGHT_GPUS, (4,), None, OK, "1 node of 4 ranks, from torchrun"),
        (
            CPU,
            (),
            {"nproc_per_node": 4, "declared_nodes": 2},
            OK,
            "1 node of 4 ranks, from the run's file; strategies plan for 2 nodes (declared_nodes)",
        ),
    ],
)
def test_the_verdict_on_the_topology_follows_from_the_machine(
    monkeypatch: pytest.MonkeyPatch, gpus: Gpus, launch: Any, cut: Any, verdict: Verdict, found: str
) -> None:
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    pose(monkeypatch, variables=zip(names, map(str, launch), strict=False))
    finding = finding_on("topology", gpus, a_run(**cut) if cut else None)
    assert (finding.verdict, finding.found) == (verdict, found)


@pytest.mark.parametrize(
    ("gpus", "launch", "cut", "wanted", "verdict", "words"),
    [
        (CPU, {}, {"nproc_per_node": 2}, "auto", OK, "2 on 2 CPU cores"),
        (CPU, {}, {"nproc_per_node": 4}, "auto", NOTE, "4 on 2 CPU cores"),
        (CPU, {}, {"nproc_per_node": 2}, "cuda", PROBLEM, "2 on 0 GPUs"),
        (EIGHT_GPUS, {}, {"nproc_per_node": 8}, "auto", OK, "8 on 8 GPUs"),
        (EIGHT_GPUS, {}, {"nproc_per_node": 16}, "auto", PROBLEM, "16 on 8 GPUs"),
        (EIGHT_GPUS, {}, {"nproc_per_node": 4}, "cuda", NOTE, "4 on 8 GPUs"),
        (EIGHT_GPUS, {}, {"nproc_per_node": 2}, "cpu", OK, "2 on 2 CPU cores"),
        (EIGHT_GPUS, {}, {"nproc_per_node": 8, "num_nodes": 3}, "auto", OK, "2 other machines"),
        (EIGHT_GPUS, {"WORLD_SIZE": "16"}, {"nproc_per_node": 8, "num_nodes": 2}, "auto", OK, "8 on 8 GPUs"),
        (EIGHT_GPUS, {"WORLD_SIZE": "8"}, {"nproc_per_node": 8, "num_nodes": 2}, "auto", PROBLEM, "has 16"),
        (EIGHT_GPUS, {"MEGATRON_FSSDP_DEVICE": "cpu"}, {"nproc_per_node": 2}, "auto", OK, "CPU cores"),
    ],
)
def test_the_verdict_on_ranks_follows_from_the_machine(
    monkeypatch: pytest.MonkeyPatch,
    gpus: Gpus,
    launch: dict[str, str],
    cut: dict[str, int],
    wanted: str,
    verdict: Verdict,
    words: str,
) -> None:
    pose(monkeypatch, variables=launch)
    finding = finding_on("ranks", gpus, a_run(wanted, **cut))
    assert finding.verdict is verdict
    assert words in finding.found


def test_context_parallelism_needs_transformer_engine() -> None:
    run = a_run(nproc_per_node=8, context_parallel_size=2)
    assert verdicts(check_devices(EIGHT_GPUS, run, False))["context parallelism"] is PROBLEM
    assert "context parallelism" not in verdicts(check_devices(EIGHT_GPUS, run, True))


def test_the_gpus_of_this_machine_are_those_of_torch() -> None:
    assert len(look_at_gpus().models) == torch.cuda.device_count()


# Checkpoint folders.


def test_a_folder_is_checked_by_writing_and_left_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_folder, "LEAST_FREE_BYTES", 0)
    assert ": writable, " in check_folder(tmp_path, "--checkpoints").found
    missing = check_folder(tmp_path / "a" / "b", "--checkpoints")
    assert missing.verdict is OK
    assert "can be created" in missing.found
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(checkpoint_folder, "LEAST_FREE_BYTES", 1 << 60)
    assert check_folder(tmp_path, "--checkpoints").verdict is NOTE


def test_a_path_that_is_not_a_folder_cannot_hold_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "dangling"):
        finding = check_folder(path, "--checkpoints")
        assert finding.verdict is PROBLEM
        assert "is not a folder" in finding.found


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "may write to"),
        (errno.EROFS, "may write to"),
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "raise the quota"),
    ],
)
def test_an_unwritable_folder_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(number, "the system's words")

    monkeypatch.setattr(checkpoint_folder, "_write_and_forget", refuse)
    finding = check_folder(tmp_path, "--checkpoints")
    assert finding.verdict is PROBLEM
    assert "the system's words" in finding.found
    assert words in finding.advice
    assert "with --checkpoints" in finding.advice
