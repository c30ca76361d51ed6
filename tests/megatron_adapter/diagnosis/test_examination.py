"""The doctor's report on made-up machines, as a whole."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_fssdp.config.strategy.strategy_registry import BrokenStrategy
from megatron_fssdp.megatron_adapter.diagnosis.checkpoint_folder import FolderState
from megatron_fssdp.megatron_adapter.diagnosis.device_checks import Launch, check_expert_path
from megatron_fssdp.megatron_adapter.diagnosis.examination import diagnose
from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict
from megatron_fssdp.megatron_adapter.diagnosis.installed_packages import ApexPackage, InstalledPackage
from megatron_fssdp.megatron_adapter.diagnosis.kernel_check import check_kernels
from megatron_fssdp.megatron_adapter.diagnosis.package_checks import check_megatron
from megatron_fssdp.megatron_adapter.diagnosis.seam_checks import MissingSeam, Seams
from megatron_fssdp.megatron_adapter.diagnosis.strategy_checks import InstalledStrategies, check_strategies
from megatron_fssdp.planning.native.kernel import KernelForm
from tests.megatron_adapter.diagnosis.machine_examples import (
    A100,
    A_SEAM,
    CPU_ONLY,
    EIGHT_GPUS,
    H100,
    HEALTHY,
    HERE,
    NOTE,
    OK,
    PROBLEM,
    run_config,
    verdicts,
)


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


def test_made_up_facts_match_what_the_machine_reports() -> None:
    """The real facts about torch have the same form as the made-up ones."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    from megatron_fssdp.megatron_adapter.diagnosis.devices import look_at_backends, look_at_devices

    assert look_at_devices().num_cores >= 1
    assert look_at_backends().has_gloo
