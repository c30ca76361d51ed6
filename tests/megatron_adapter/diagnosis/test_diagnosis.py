"""The doctor's verdicts on made-up machines."""

import errno
import importlib.util
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from megatron_fssdp.config.run.parallelism_settings import ParallelismSettings
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.strategy.strategy_registry import BrokenStrategy
from megatron_fssdp.megatron_adapter.diagnosis import checkpoint_folder, installed_packages
from megatron_fssdp.megatron_adapter.diagnosis.checkpoint_folder import (
    FolderState,
    check_folder,
    look_at_folder,
)
from megatron_fssdp.megatron_adapter.diagnosis.device_checks import (
    Launch,
    check_context,
    check_expert_path,
    check_gloo,
    check_gpus,
    check_nccl,
    check_ranks,
    check_topology,
)
from megatron_fssdp.megatron_adapter.diagnosis.devices import Backends, Devices, Gpu
from megatron_fssdp.megatron_adapter.diagnosis.examination import Facts, diagnose
from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict
from megatron_fssdp.megatron_adapter.diagnosis.installed_packages import (
    ApexPackage,
    InstalledPackage,
    look_for,
    look_for_apex,
)
from megatron_fssdp.megatron_adapter.diagnosis.kernel_check import check_kernels
from megatron_fssdp.megatron_adapter.diagnosis.package_checks import (
    check_apex,
    check_megatron,
    check_python,
    check_torch,
    check_transformer_engine,
)
from megatron_fssdp.megatron_adapter.diagnosis.seam_checks import (
    MissingSeam,
    Seams,
    check_seams,
    look_for_seams,
)
from megatron_fssdp.megatron_adapter.diagnosis.strategy_checks import InstalledStrategies, check_strategies
from megatron_fssdp.megatron_adapter.support import capabilities
from megatron_fssdp.megatron_adapter.support.tested_versions import TESTED_VERSIONS, is_tested
from megatron_fssdp.planning.native.kernel import KernelForm

OK, NOTE, PROBLEM = Verdict.OK, Verdict.NOTE, Verdict.PROBLEM
HERE = Path("/site-packages/it")
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 << 30, (9, 0), has_grouped_kernel=True)
A100 = Gpu("NVIDIA A100-SXM4-80GB", 80 << 30, (8, 0), has_grouped_kernel=False)
CPU_ONLY = Devices(num_cores=2, memory_bytes=8 << 30)
EIGHT_GPUS = Devices(num_cores=64, memory_bytes=1 << 40, gpus=(H100,) * 8, cuda_build="13.0")
ALL_BACKENDS = Backends(has_gloo=True, has_nccl=True, nccl_version="2.30.7")
A_SEAM = capabilities.Seam("megatron.core.moe", "Layer.route", "plans before the gate", "every strategy")

HEALTHY = Facts(
    python_version="3.12.1",
    executable="/usr/bin/python3",
    torch=InstalledPackage("2.6.0", HERE),
    megatron=InstalledPackage("0.19.2", HERE),
    seams=Seams(25),
    devices=CPU_ONLY,
    backends=ALL_BACKENDS,
)


def run_config(**parallelism: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8},
            "training": {"iterations": 1, "global_batch_size": 8},
            "parallelism": parallelism,
        }
    )


def verdicts(findings: Any) -> dict[str, Verdict]:
    return {finding.name: finding.verdict for finding in findings}


# The report as a whole.


def test_plain_kernels_are_a_note_with_the_next_step() -> None:
    plain = check_kernels(KernelForm(False, "not compiled"))
    assert (plain.verdict, plain.found) == (NOTE, "plain Python (not compiled)")
    assert "install a C compiler" in plain.advice


def test_a_healthy_cpu_machine_has_no_problem() -> None:
    findings = diagnose(HEALTHY, None)
    assert verdicts(findings) == {
        "Python": OK,
        "torch": OK,
        "Megatron": OK,
        "Megatron's seams": OK,
        "Transformer Engine": OK,
        "Apex": OK,
        "strategies": OK,
        "planning kernels": OK,
        "gloo": OK,
        "NCCL": OK,
        "GPUs": NOTE,
        "topology": OK,
    }


def test_strategies_of_other_packages_are_named_and_broken_ones_are_notes() -> None:
    found = InstalledStrategies(
        10, (("mine", "my-package"),), (BrokenStrategy("lost", "brittle", "no module"),)
    )
    usable, broken = check_strategies(found)
    assert usable == Finding("strategies", "10 from megatron-fssdp, mine from my-package", OK)
    assert broken.verdict is NOTE
    assert "brittle, cannot be used: no module" in broken.found
    assert "pip uninstall brittle" in broken.advice


def test_a_machine_with_gpus_and_everything_else_is_ok_throughout() -> None:
    facts = replace(
        HEALTHY,
        devices=EIGHT_GPUS,
        engine=InstalledPackage("2.5.0", HERE),
        apex=ApexPackage("0.1", HERE, is_nvidias=True, has_cuda_extensions=True),
        folders=(("--checkpoints", FolderState(Path("/c"), free_bytes=1 << 40)),),
    )
    findings = diagnose(facts, run_config(nproc_per_node=8))
    assert set(verdicts(findings).values()) == {OK}
    assert {"ranks", "checkpoint folder"} <= verdicts(findings).keys()


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"python_version": "3.11.9"}, {"Python"}),
        ({"torch": InstalledPackage("2.5.1", HERE)}, {"torch"}),
        ({"megatron": InstalledPackage(), "seams": None}, {"Megatron"}),
        ({"megatron": InstalledPackage("0.22.0", HERE)}, set()),  # the verdict depends on its seams
        ({"seams": Seams(25, (MissingSeam(A_SEAM, "AttributeError"),))}, {"seam Layer.route"}),
        ({"apex": ApexPackage("0.9.10.dev0", HERE)}, set()),
        ({"devices": replace(CPU_ONLY, has_nvidia_driver=True)}, {"GPUs"}),
        ({"folders": (("--checkpoints", FolderState(Path("/c"), error="no")),)}, {"checkpoint folder"}),
        ({"launch": Launch(12, 8)}, {"topology"}),
    ],
)
def test_one_fault_is_one_problem(changes: dict[str, Any], problems: set[str]) -> None:
    found = verdicts(diagnose(replace(HEALTHY, **changes), None))
    assert {name for name, verdict in found.items() if verdict is PROBLEM} == problems


def test_the_experts_path_is_named_where_there_are_gpus() -> None:
    assert check_expert_path(CPU_ONLY) == []
    (fast,) = check_expert_path(EIGHT_GPUS)
    assert fast.verdict is OK
    (mixed,) = check_expert_path(replace(EIGHT_GPUS, gpus=(H100, A100, A100)))
    assert mixed.verdict is NOTE
    assert mixed.found == "one product for each expert on NVIDIA A100-SXM4-80GB (capability 8.0)"
    assert "9.x and 10.x" in mixed.advice


def test_an_incomplete_transformer_engine_is_one_problem_and_megatron_a_note() -> None:
    error = "RuntimeError: Found empty `transformer-engine` meta package installed."
    facts = replace(
        HEALTHY,
        engine=InstalledPackage("2.5.0", HERE, error),
        megatron=InstalledPackage("0.19.2", HERE, error, broken_by="Transformer Engine"),
        seams=None,
    )
    findings = {finding.name: finding for finding in diagnose(facts, None)}
    assert [name for name, one in findings.items() if one.verdict is PROBLEM] == ["Transformer Engine"]
    engine = findings["Transformer Engine"]
    assert f"({HERE}) is installed, but cannot be imported: RuntimeError" in engine.found
    assert "wanted a complete installation or none" in engine.advice
    assert "because of Transformer Engine" in findings["Megatron"].found
    apex = replace(facts.megatron, broken_by="Apex")
    assert check_megatron(apex).verdict is PROBLEM, "the check of Apex does not import it"


def test_without_torch_the_rest_is_still_reported() -> None:
    facts = replace(
        HEALTHY,
        torch=InstalledPackage(),
        megatron=InstalledPackage("0.19.2", HERE, "ModuleNotFoundError: No module named 'torch'"),
        seams=None,
        devices=None,
        backends=None,
    )
    findings = verdicts(diagnose(facts, run_config(nproc_per_node=2)))
    assert {name for name, verdict in findings.items() if verdict is PROBLEM} == {"torch", "Megatron"}
    assert findings["ranks"] is NOTE


@pytest.mark.parametrize(("verdict", "advice"), [(PROBLEM, ""), (NOTE, "one line\nand another")])
def test_a_problem_has_advice_of_one_line(verdict: Verdict, advice: str) -> None:
    with pytest.raises(ValueError, match="advice"):
        Finding("x", "y", verdict, advice)


# Versions and packages.


def test_the_tested_ranges_equal_those_of_the_project_file() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    stated = {
        requirement.name: requirement.specifier
        for requirement in map(
            Requirement, [*project["dependencies"], *project["optional-dependencies"]["te"]]
        )
    }
    stated["python"] = Requirement(f"python{project['requires-python']}").specifier
    for name, versions in TESTED_VERSIONS.items():
        assert stated[name] == Requirement(name + versions).specifier, name


@pytest.mark.parametrize(
    ("distribution", "version", "expected"),
    [
        ("torch", "2.6.0a0+ecf3bae.nv25.01", True),  # NVIDIA's containers
        ("torch", "2.6.0+cu124", True),
        ("torch", "2.5.1", False),
        ("megatron-core", "0.18.1", False),
        ("megatron-core", "0.20.9", True),
        ("megatron-core", "0.21.0rc0", False),
        ("megatron-core", "0.19.2+6d5d9bf", True),
        ("python", "3.12.0", True),
        ("python", "3.11.9", False),
        ("torch", "from source", None),
    ],
)
def test_versions_are_compared_without_their_suffixes(
    distribution: str, version: str, expected: bool | None
) -> None:
    assert is_tested(distribution, version) is expected


def test_the_advice_for_an_old_version_names_the_wanted_ones() -> None:
    assert ">=3.12" in check_python("3.10.2", "/usr/bin/python3").advice
    assert "pip install 'torch>=2.6'" in check_torch(InstalledPackage("2.4.0", HERE)).advice


@pytest.mark.parametrize(
    ("package", "verdict", "words"),
    [
        (InstalledPackage(), PROBLEM, "pip install 'megatron-core>=0.19,<0.21'"),
        (InstalledPackage("0.19.2", HERE, "ImportError: libx"), PROBLEM, "fix the cause"),
        (InstalledPackage("0.18.0", HERE), NOTE, "megatron-core >=0.19,<0.21"),
        (InstalledPackage(None, HERE), NOTE, "compare the first losses"),
        (InstalledPackage("0.20.0", HERE), OK, ""),
    ],
)
def test_the_verdict_on_megatron_follows_from_its_installation(
    package: InstalledPackage, verdict: Verdict, words: str
) -> None:
    finding = check_megatron(package)
    assert (finding.verdict, words in finding.advice) == (verdict, True)


@pytest.mark.parametrize(
    ("engine", "has_gpus", "verdict"),
    [
        (InstalledPackage(), False, OK),
        (InstalledPackage(), True, NOTE),
        (InstalledPackage("2.5.0+abc", HERE), True, OK),
        (InstalledPackage("1.13.0", HERE), True, NOTE),
        (InstalledPackage("2.5.0", HERE, "ImportError: undefined symbol"), True, PROBLEM),
    ],
)
def test_the_verdict_on_transformer_engine_follows_from_its_installation(
    engine: InstalledPackage, has_gpus: bool, verdict: Verdict
) -> None:
    assert check_transformer_engine(engine, has_gpus).verdict is verdict


def test_an_unrelated_apex_is_told_from_nvidias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    unrelated = look_for_apex()
    assert (unrelated.location, unrelated.is_nvidias) == (package, False)
    finding = check_apex(unrelated)
    assert finding.verdict is NOTE
    assert "unrelated" in finding.found
    assert "pip uninstall apex" in finding.advice

    (package / "normalization").mkdir()
    assert look_for_apex().is_nvidias
    assert "CUDA extensions" in check_apex(look_for_apex()).found


def test_a_missing_apex_is_not_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_packages.importlib.util, "find_spec", lambda name: None)
    assert check_apex(look_for_apex()).verdict is OK


def test_a_package_that_fails_on_import_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_thing.py").write_text(
        "__version__ = '1.0'\nraise OSError('libfoo.so.1:\\nnot found')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    package = look_for("broken_thing", "broken-thing")
    assert (package.location, package.error, package.works) == (tmp_path, "OSError: libfoo.so.1:", False)
    assert look_for("no_such_parent.child", "no-such-thing") == InstalledPackage()
    assert look_for("json", "no-such-thing").works


# Seams.


def test_a_missing_seam_names_itself_and_who_needs_it() -> None:
    _, missing = check_seams(Seams(25, (MissingSeam(A_SEAM, "AttributeError: no route"),)))
    assert (missing.name, missing.verdict) == ("seam Layer.route", PROBLEM)
    assert "megatron.core.moe" in missing.found
    assert "for every strategy" in missing.advice
    assert "pip install 'megatron-core>=0.19,<0.21'" in missing.advice
    _, optional = check_seams(Seams(25, (MissingSeam(A_SEAM, "x", is_optional=True),)))
    assert optional.verdict is NOTE


def test_seams_are_found_and_missed_in_the_installed_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = look_for_seams()
    assert whole.missing == ()
    assert whole.num_sought > 20

    gone = capabilities.Seam("megatron.core.no_such_module", "X", "does something", "something")
    monkeypatch.setattr(capabilities, "_OPTIONAL_SEAMS", (gone,))
    (missing,) = look_for_seams().missing
    assert (missing.seam, missing.is_optional) == (gone, True)
    assert "no_such_module" in missing.reason


def test_a_module_of_megatron_that_raises_is_a_missing_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("broken kernel")

    monkeypatch.setattr(capabilities.importlib, "import_module", fail)
    seams = look_for_seams()
    assert len(seams.missing) == seams.num_sought
    assert seams.missing[0].reason == "RuntimeError: broken kernel"


# Devices and ranks.


def test_the_verdict_on_back_ends_follows_from_the_machine() -> None:
    nothing = Backends(has_gloo=False, has_nccl=False)
    assert check_gloo(ALL_BACKENDS).verdict is OK
    assert check_gloo(nothing).verdict is PROBLEM
    assert check_nccl(nothing, has_gpus=False).verdict is OK
    assert check_nccl(nothing, has_gpus=True).verdict is PROBLEM
    assert check_nccl(ALL_BACKENDS, has_gpus=True).found == "2.30.7"


@pytest.mark.parametrize(
    ("devices", "verdict", "words"),
    [
        (EIGHT_GPUS, OK, "8 × NVIDIA H100 80GB HBM3, 80.0 GiB"),
        (replace(EIGHT_GPUS, asked="cpu"), NOTE, "not used"),
        (replace(EIGHT_GPUS, gpu_error="RuntimeError: Xid"), PROBLEM, "Xid"),
        (CPU_ONLY, NOTE, "none; ranks run on the CPU (2 CPU cores, 8.0 GiB)"),
        (replace(CPU_ONLY, asked="cuda"), PROBLEM, "asks for them"),
        (replace(CPU_ONLY, asked="gpu"), PROBLEM, "'gpu'"),
        (replace(CPU_ONLY, has_nvidia_driver=True), PROBLEM, "without CUDA"),
        (replace(CPU_ONLY, has_nvidia_driver=True, cuda_build="13.0"), PROBLEM, "CUDA 13.0"),
        (replace(CPU_ONLY, has_nvidia_driver=True, cuda_build="13.0", visible=""), NOTE, "hidden"),
        (replace(CPU_ONLY, has_nvidia_driver=True, asked="cpu"), NOTE, "none"),
    ],
)
def test_the_verdict_on_gpus_follows_from_the_machine(devices: Devices, verdict: Verdict, words: str) -> None:
    finding = check_gpus(devices)
    assert finding.verdict is verdict
    assert words in finding.found


@pytest.mark.parametrize(
    ("devices", "launch", "cut", "verdict", "found"),
    [
        (EIGHT_GPUS, Launch(), None, OK, "1 node (this machine) of 8 GPUs"),
        (CPU_ONLY, Launch(), None, OK, "1 node (this machine) of CPU ranks"),
        (EIGHT_GPUS, Launch(16, 8), None, OK, "2 nodes of 8 ranks, from torchrun"),
        (EIGHT_GPUS, Launch(20, 8), None, PROBLEM, "3 nodes of 8/8/4 ranks, from torchrun"),
        (EIGHT_GPUS, Launch(4, None), None, OK, "1 node of 4 ranks, from torchrun"),
        (
            CPU_ONLY,
            Launch(),
            {"nproc_per_node": 4, "declared_nodes": 2},
            OK,
            "1 node of 4 ranks, from the run's file; strategies plan for 2 nodes (declared_nodes)",
        ),
        (
            replace(EIGHT_GPUS, pairs_without_peer_access=((0, 4),)),
            Launch(),
            None,
            NOTE,
            "1 node (this machine) of 8 GPUs; no peer access between GPUs 0-4",
        ),
    ],
)
def test_the_verdict_on_the_topology_follows_from_the_machine(
    devices: Devices, launch: Launch, cut: Any, verdict: Verdict, found: str
) -> None:
    finding = check_topology(devices, launch, ParallelismSettings(**cut) if cut else None)
    assert (finding.verdict, finding.found) == (verdict, found)


@pytest.mark.parametrize(
    ("devices", "launch", "cut", "wanted", "verdict", "words"),
    [
        (CPU_ONLY, Launch(), {"nproc_per_node": 2}, "auto", OK, "2 on 2 CPU cores"),
        (CPU_ONLY, Launch(), {"nproc_per_node": 4}, "auto", NOTE, "4 on 2 CPU cores"),
        (CPU_ONLY, Launch(), {"nproc_per_node": 2}, "cuda", PROBLEM, "2 on 0 GPUs"),
        (EIGHT_GPUS, Launch(), {"nproc_per_node": 8}, "auto", OK, "8 on 8 GPUs"),
        (EIGHT_GPUS, Launch(), {"nproc_per_node": 16}, "auto", PROBLEM, "16 on 8 GPUs"),
        (EIGHT_GPUS, Launch(), {"nproc_per_node": 4}, "cuda", NOTE, "4 on 8 GPUs"),
        (EIGHT_GPUS, Launch(), {"nproc_per_node": 4}, "cpu", OK, "4 on 64 CPU cores"),
        (EIGHT_GPUS, Launch(), {"nproc_per_node": 8, "num_nodes": 3}, "auto", OK, "2 other machines"),
        (EIGHT_GPUS, Launch(16, 8), {"nproc_per_node": 8, "num_nodes": 2}, "auto", OK, "8 on 8 GPUs"),
        (EIGHT_GPUS, Launch(8, 8), {"nproc_per_node": 8, "num_nodes": 2}, "auto", PROBLEM, "has 16"),
        (replace(EIGHT_GPUS, asked="cpu"), Launch(), {"nproc_per_node": 4}, "auto", OK, "CPU cores"),
    ],
)
def test_the_verdict_on_ranks_follows_from_the_machine(
    devices: Devices, launch: Launch, cut: dict[str, int], wanted: str, verdict: Verdict, words: str
) -> None:
    finding = check_ranks(devices, launch, ParallelismSettings(**cut), wanted)
    assert finding.verdict is verdict
    assert words in finding.found


def test_context_parallelism_needs_transformer_engine_and_gpus() -> None:
    assert check_context(EIGHT_GPUS, True, 2, "auto").verdict is OK
    assert check_context(EIGHT_GPUS, False, 2, "auto").verdict is PROBLEM
    assert check_context(CPU_ONLY, True, 2, "auto").verdict is PROBLEM
    facts = replace(HEALTHY, devices=EIGHT_GPUS)
    findings = verdicts(diagnose(facts, run_config(nproc_per_node=8, context=2)))
    assert findings["context parallelism"] is PROBLEM


# Checkpoint folders.


def test_a_folder_is_checked_by_writing_and_left_unchanged(tmp_path: Path) -> None:
    state = look_at_folder(tmp_path)
    assert (state.exists, state.error) == (True, "")
    assert state.free_bytes is not None
    assert list(tmp_path.iterdir()) == []

    missing = look_at_folder(tmp_path / "a" / "b")
    assert (missing.exists, missing.error) == (False, "")
    assert list(tmp_path.iterdir()) == []
    assert "can be created" in check_folder(missing, "--checkpoints").found


def test_a_path_that_is_not_a_folder_cannot_hold_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "dangling"):
        state = look_at_folder(path)
        assert "is not a folder" in state.error
        assert check_folder(state, "--checkpoints").verdict is PROBLEM


@pytest.mark.parametrize(
    ("number", "is_full", "words"),
    [
        (errno.EACCES, False, "may write to"),
        (errno.EROFS, False, "may write to"),
        (errno.ENOSPC, True, "make room"),
        (errno.EDQUOT, True, "raise the quota"),
    ],
)
def test_an_unwritable_folder_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_full: bool, words: str
) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(number, "the system's words")

    monkeypatch.setattr(checkpoint_folder, "_write_and_forget", refuse)
    state = look_at_folder(tmp_path)
    assert (state.error, state.is_full) == ("the system's words", is_full)
    finding = check_folder(state, "--checkpoints")
    assert finding.verdict is PROBLEM
    assert words in finding.advice
    assert "with --checkpoints" in finding.advice


def test_little_free_space_is_a_note() -> None:
    little = FolderState(Path("/c"), free_bytes=1 << 29)
    assert check_folder(little, "--checkpoints").verdict is NOTE
    assert check_folder(replace(little, free_bytes=1 << 31), "--checkpoints").verdict is OK


def test_examples_of_this_file_match_what_the_machine_reports() -> None:
    """The real facts about torch have the same form as the made-up ones above."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    from megatron_fssdp.megatron_adapter.diagnosis.devices import look_at_backends, look_at_devices

    assert look_at_devices().num_cores >= 1
    assert look_at_backends().has_gloo
