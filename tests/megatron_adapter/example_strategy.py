"""The worked example of docs/contributing.md, and how it is registered."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from megatron_fssdp.config.strategy_registry import STRATEGIES, register_strategy

NAME = "second_home"
FILE = Path(__file__).parents[2] / "docs" / "examples" / f"{NAME}.py"


def example() -> ModuleType:
    """The file as a module."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, FILE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = module
        spec.loader.exec_module(module)
    return sys.modules[NAME]


def register_example() -> None:
    """What the package does; a rank that was forked from a registered process has it already."""
    if NAME in STRATEGIES:
        return
    register_strategy(
        NAME, settings=example().SecondHomeSettings, strategy=example().SecondHome, summary="an example"
    )


def forget_example() -> None:
    """Undo it."""
    STRATEGIES._entries.pop(NAME, None)
