"""The doctor's verdicts on the functions of Megatron that the adapter wraps."""

import pytest

from megatron_fssdp.megatron_adapter.diagnosis.seam_checks import (
    MissingSeam,
    Seams,
    check_seams,
    look_for_seams,
)
from megatron_fssdp.megatron_adapter.support import capabilities
from tests.megatron_adapter.diagnosis.machine_examples import A_SEAM, NOTE, PROBLEM


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
