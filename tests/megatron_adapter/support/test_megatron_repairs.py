import importlib
import importlib.metadata
import logging
import sys

import pytest

from megatron_fssdp.megatron_adapter.support.megatron_repairs import (
    compilation_if_needed,
    log_at_info,
    log_in_quiet_hosts,
)

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


class Handler(logging.StreamHandler):
    pass


@pytest.mark.parametrize(
    ("module", "handler", "level", "wanted"),
    [
        ("absl.logging", logging.StreamHandler, logging.WARNING, (Handler, logging.INFO)),
        ("absl.logging", logging.StreamHandler, logging.ERROR, (logging.StreamHandler, logging.ERROR)),
        ("absl.logging", logging.NullHandler, logging.WARNING, (logging.NullHandler, logging.WARNING)),
        ("other", logging.StreamHandler, logging.WARNING, (logging.StreamHandler, logging.WARNING)),
    ],
)
def test_only_what_absl_has_configured_is_replaced(module, handler, level, wanted, monkeypatch):
    monkeypatch.delitem(sys.modules, "absl.logging", raising=False)
    monkeypatch.setitem(sys.modules, module, logging)
    monkeypatch.setattr(logging.root, "handlers", [handler()])
    monkeypatch.setattr(logging.root, "level", level)
    log_at_info(Handler)
    assert (type(logging.root.handlers[0]), logging.root.level) == wanted


@pytest.mark.parametrize("handlers", [1, 0], ids=["verl", "Ray"])
@pytest.mark.parametrize(("asked", "is_seen"), [(logging.NOTSET, True), (logging.WARNING, False)])
def test_lines_of_the_plugin_are_seen_once_in_quiet_hosts(monkeypatch, capsys, handlers, asked, is_seen):
    package = logging.getLogger("megatron_fssdp")
    for logger, level in ((logging.root, logging.WARNING), (package, asked)):
        monkeypatch.setattr(logger, "handlers", [])
        logger.manager._clear_cache()
        monkeypatch.setattr(logger, "level", level)
    logging.root.handlers += [logging.StreamHandler() for _ in range(handlers)]
    log_in_quiet_hosts()
    log_in_quiet_hosts()
    logging.getLogger("megatron_fssdp.strategies").info("here")
    assert capsys.readouterr().err.count("here") == is_seen
    package.manager._clear_cache()
