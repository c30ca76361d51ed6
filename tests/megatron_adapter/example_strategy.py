"""The worked example of docs/contributing.md, and how it is registered."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from megatron_fssdp.config import strategy_selection
from megatron_fssdp.strategies import registry

NAME = "second_home"
FILE = Path(__file__).parents[2] / "docs" / "examples" / f"{NAME}.py"


def example() -> ModuleType:
    """The example's file as a module."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, FILE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = module
        spec.loader.exec_module(module)
    return sys.modules[NAME]


def register_example() -> None:
    """Register the example as the page describes: write it into the two dicts."""
    strategy_selection.SETTINGS_BY_STRATEGY[NAME] = example().SecondHomeSettings
    registry._STRATEGIES[NAME] = example().SecondHome


def forget_example() -> None:
    """Remove the example from the two dicts."""
    strategy_selection.SETTINGS_BY_STRATEGY.pop(NAME, None)
    registry._STRATEGIES.pop(NAME, None)
