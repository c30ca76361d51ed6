import pytest

from megatron_fssdp.config.run import megatron_options as parser


def options():
    flags = parser.megatron_parser.__wrapped__()._actions
    return {flag.dest: (flag.nargs, str(flag.type), flag.choices, flag.default) for flag in flags}


def test_kept_options_equal_those_that_megatron_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh = options()
    (kept,) = (tmp_path / "megatron-fssdp").iterdir()
    assert fresh["attention_backend"][2:] == (["flash", "fused", "unfused", "local", "auto"], "auto")
    assert len(fresh) > 500
    kept.write_bytes(b"damaged")
    assert options() == fresh
    monkeypatch.setattr(parser, "_read_actions", lambda: pytest.fail("Megatron is asked again"))
    assert options() == fresh


def test_another_or_an_edited_megatron_is_read_anew(tmp_path, monkeypatch):
    package = tmp_path / "megatron"
    (package / "training").mkdir(parents=True)
    (package / "training" / "arguments.py").write_text("one = 1\n")
    spec = type("Spec", (), {"submodule_search_locations": [str(package)]})
    monkeypatch.setattr(parser.importlib.util, "find_spec", lambda _: spec)
    before = parser._cache_file()
    assert parser._cache_file() == before
    (package / "training" / "arguments.py").write_text("one = 10\n")
    assert parser._cache_file() != before
    before = parser._cache_file()
    monkeypatch.setattr(parser.importlib.metadata, "version", lambda _: "0.0.1")
    assert parser._cache_file() != before


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(parser, "_read_actions", list)
    assert parser.megatron_parser.__wrapped__()._actions == []
