"""Megatron's options are read once for each installed state of Megatron."""

from pathlib import Path

import pytest

from megatron_fssdp.config.run import megatron_options


def test_options_are_kept_for_exactly_this_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "megatron"
    package.mkdir()
    (package / "arguments.py").write_text("one = 1\n")
    spec = type("Spec", (), {"submodule_search_locations": [str(package)]})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    read = megatron_options.options.__wrapped__
    known, calls = dict(list(megatron_options.options().items())[:50]), []
    monkeypatch.setattr(megatron_options, "_read_options", lambda: calls.append(1) or known)
    monkeypatch.setattr(megatron_options.importlib.util, "find_spec", lambda _: spec)
    assert read() == read() == known
    assert len(calls) == 1
    (kept,) = (tmp_path / "megatron-fssdp").iterdir()
    kept.write_bytes(b"damaged")
    assert read() == known
    (package / "arguments.py").write_text("one = 10\n")
    assert read() == known
    monkeypatch.setattr(megatron_options.importlib.metadata, "version", lambda _: "0.0.1")
    assert read() == known
    assert len(calls) == 4, "a damaged file, an edited Megatron, another version"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert read() == known, "a cache that cannot be written only costs time"


def test_options_have_the_kinds_choices_and_switches_of_megatrons_parser() -> None:
    found = megatron_options.options()
    assert len(found) > 500
    assert found["attention_backend"].choices == ["flash", "fused", "unfused", "local", "auto"]
    assert (found["attention_backend"].default, found["num_layers"].kind) == ("auto", "int")
    assert found["add_bias_linear"].switches == {"False": "--disable-bias-linear"}
    assert found["moe_router_topk"].section == "model"
