import importlib
import importlib.metadata
import logging
import sys

import pytest

from megatron_fssdp.megatron_adapter.support import megatron_repairs as repairs

NAME = "megatron.core.datasets.helpers_cpp"


def compile_helpers():
    raise AssertionError("there are compiled helpers")


def without_the_module(name):
    raise ImportError(name)


def test_the_helpers_of_the_wheel_are_used():
    repairs.compilation_if_needed(compile_helpers)()


def test_a_checkout_uses_the_helpers_of_the_wheel(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", without_the_module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    repairs.compilation_if_needed(compile_helpers)()
    assert hasattr(sys.modules[NAME], "build_sample_idx_int32")


def test_megatron_compiles_without_a_wheel(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", without_the_module)
    monkeypatch.setattr(importlib.metadata, "files", without_the_module)
    assert repairs.compilation_if_needed(compile_helpers) is compile_helpers


STREAM, NULL, WARNING = logging.StreamHandler, logging.NullHandler, logging.WARNING


class Handler(STREAM):
    """Logs at INFO."""


@pytest.mark.parametrize(
    ("module", "handler", "level", "wanted"),
    [
        ("absl.logging", STREAM, WARNING, (Handler, logging.INFO)),
        ("absl.logging", STREAM, logging.ERROR, (STREAM, logging.ERROR)),
        ("absl.logging", NULL, WARNING, (NULL, WARNING)),
        ("other", STREAM, WARNING, (STREAM, WARNING)),
    ],
)
def test_only_what_absl_has_configured_is_replaced(module, handler, level, wanted, monkeypatch):
    monkeypatch.delitem(sys.modules, "absl.logging", raising=False)
    monkeypatch.setitem(sys.modules, module, logging)
    monkeypatch.setattr(logging.root, "handlers", [handler()])
    monkeypatch.setattr(logging.root, "level", level)
    repairs.log_at_info(Handler)
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
    repairs.log_in_quiet_hosts()
    repairs.log_in_quiet_hosts()
    logging.getLogger("megatron_fssdp.strategies").info("here")
    assert capsys.readouterr().err.count("here") == is_seen
    package.manager._clear_cache()
