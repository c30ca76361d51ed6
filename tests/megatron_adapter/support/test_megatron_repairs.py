import importlib
import importlib.metadata
import sys

from megatron_fssdp.megatron_adapter.support.megatron_repairs import compilation_if_needed

NAME = "megatron.core.datasets.helpers_cpp"


def compile_helpers():
    raise AssertionError("there are compiled helpers")


def without_the_module(name):
    raise ImportError(name)


def test_the_helpers_of_the_wheel_are_used():
    compilation_if_needed(compile_helpers)()


def test_a_checkout_uses_the_helpers_of_the_wheel(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", without_the_module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    compilation_if_needed(compile_helpers)()
    assert hasattr(sys.modules[NAME], "build_sample_idx_int32")


def test_megatron_compiles_without_a_wheel(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", without_the_module)
    monkeypatch.setattr(importlib.metadata, "files", without_the_module)
    assert compilation_if_needed(compile_helpers) is compile_helpers
