"""The tables of docs/architecture.md as a test: which room may import which, and which sub-room.

Every import statement counts: at the top of a file, in a function, and under ``if TYPE_CHECKING``.
"""

import ast
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import megatron_fssdp

PACKAGE = "megatron_fssdp"
ROOT = Path(megatron_fssdp.__file__).parent

# What the packages of this project may import from each other (their own files aside), and
# from elsewhere. The standard library is allowed everywhere except where FORBIDDEN says no.
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    # Megatron's argument parser, which knows the keys of a run's YAML, is imported only when it is asked.
    "config": (set(), {"pydantic", "pydantic_core", "yaml", "megatron"}),
    "planning": ({"config"}, {"numpy", "cython"}),
    "strategies": ({"planning", "config"}, {"numpy"}),
    "simulation": ({"strategies", "planning", "config"}, {"numpy"}),
    "collectives": ({"planning"}, {"torch"}),
    # Megatron's dispatchers with other exchanges: they know slots, and nothing of placements or plans.
    "dispatchers": ({"collectives", "planning", "config"}, {"torch", "numpy", "megatron"}),
    "runtime": ({"collectives", "strategies", "planning"}, {"torch", "numpy"}),
    "reporting": (
        {"planning", "simulation", "config"},
        {"numpy", "matplotlib", "pydantic", "rich", "jinja2", "markupsafe", "plotly"},
    ),
    # Text to Megatron's indexed files, written by Megatron's own writer: knows no model, no strategy.
    "data": ({"config"}, {"numpy", "tokenizers", "huggingface_hub", "megatron"}),
    # For tests of all layers, users' too: ranks, Megatron's parallel state, random placements. On virtual
    # devices, Megatron's loop needs some of the replacements that the adapter has for CPU ranks.
    "testing": ({"planning", "megatron_adapter"}, {"numpy", "torch", "megatron"}),
    "megatron_adapter": (
        {
            "config",
            "planning",
            "strategies",
            "simulation",
            "collectives",
            "dispatchers",
            "runtime",
            "reporting",
        },
        {"numpy", "torch", "megatron", "packaging", "psutil", "transformer_engine"},
    ),
    # Scripts that ranks run; they are started by their paths.
    "pretraining": ({"data", "megatron_adapter"}, {"megatron", "torch"}),
    "launch": ({"config", "data", "reporting", "megatron_adapter"}, {"torch", "rich"}),
    "cli": (
        {
            *("config", "planning", "strategies", "simulation", "reporting", "data"),
            *("megatron_adapter", "launch"),
        },
        {"torch", "typer", "rich"},
    ),
    # `import megatron_fssdp` and `python -m megatron_fssdp` lead to the adapter and the command line.
    "<top>": ({"config", "megatron_adapter", "cli"}, set()),
}

# The sub-rooms of a room, and which of its other sub-rooms each may import. "" stands for the files that lie
# directly in the room.
SUB_ROOMS: dict[str, dict[str, set[str]]] = {
    "planning": {
        "": {"placement", "transfer", "dispatch", "cost"},
        "placement": {""},
        "transfer": {"", "placement"},
        "dispatch": {"", "placement"},
        "slots": {"", "placement", "dispatch"},
        "cost": {"", "placement", "transfer", "dispatch"},
        "papers": {"", "placement", "transfer", "dispatch", "cost"},
    },
    "config": {"": set(), "strategy": {""}, "run": {"", "strategy"}, "sweep": {"", "strategy", "run"}},
    "strategies": {"": set(), "papers": {""}},
    "collectives": {"": set(), "sparse": {""}, "probes": {""}},
    "dispatchers": {"": {"parm"}, "parm": set()},
    "runtime": {
        "": set(),
        "experts": {""},
        "slots": {"", "experts"},
        "clocks": {"", "slots"},
        "layers": {"", "experts", "slots", "clocks"},
    },
    "reporting": {
        "": {"records"},
        "records": set(),
        "html": {"records"},
        "page": {"", "records", "html"},
        "simulation_page": {"", "records", "html", "page"},
        "sweep": {"", "records", "html", "page"},
    },
    "megatron_adapter": {
        "": set(),
        "experts": {""},
        "cpu": {""},
        "support": {""},
        "routing": {"", "experts", "cpu", "support"},
        "checkpoints": {"", "experts", "cpu", "support"},
        "diagnosis": {"", "experts", "cpu", "support"},
        "layer": {"", "experts", "cpu", "support", "routing", "checkpoints"},
        "training": {"", "experts", "cpu", "support", "routing", "checkpoints", "layer"},
        "entry": {"", "experts", "cpu", "support", "routing", "checkpoints", "layer", "training"},
    },
    "testing": {"": set(), "virtual_cuda": {""}},
    "cli": {"": {"analysis"}, "analysis": {""}},
}

FORBIDDEN = {
    "planning": {"time", "datetime", "random", "os", "argparse", "threading"},
    "strategies": {"time", "datetime", "random", "os", "argparse", "threading"},
    "simulation": {"time", "datetime", "random", "os", "argparse"},
}
"""Parts of the standard library that would make a plan depend on more than its arguments."""

# Below the adapter the global process groups stay untouched, and environment variables unread.
NO_ENVIRONMENT = {"collectives", "runtime", "planning", "strategies", "simulation"}


def imports_of(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything a module imports; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                parents = package[: len(package) - (node.level - 1)]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and node.args:
                argument = node.args[0]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def sub_room_of(names: list[str] | tuple[str, ...], sub_rooms: Collection[str]) -> str:
    """The sub-room that a path or dotted name below a room leads into; "" if it stays in the room."""
    return names[0] if names and names[0] in sub_rooms else ""


def layer_of(parts: tuple[str, ...]) -> str:
    return parts[0] if len(parts) > 1 else "<top>"


def violations(source: str, parts: tuple[str, ...]) -> list[str]:
    """Imports of a file that the table does not allow.

    Args:
        source: Text of the file.
        parts: Path of the file below the package.
    """
    layer = layer_of(parts)
    if layer not in LAYERS:
        return [f"package {layer} is not in the table: add it to docs/architecture.md and here"]
    inner, outer = LAYERS[layer]
    sub_rooms = SUB_ROOMS.get(layer, {"": set()})
    own_sub_room = parts[1] if len(parts) > 2 else ""
    if own_sub_room not in sub_rooms:
        where = f"{layer}/{own_sub_room}"
        return [f"sub-room {where} is not in the table: add it to docs/architecture.md and here"]
    is_package = parts[-1] == "__init__.py"
    module = ".".join([PACKAGE, *parts[:-1], *([] if is_package else [parts[-1].removesuffix(".py")])])
    tree = ast.parse(source)
    found = []
    for line, name in imports_of(tree, module, is_package):
        top, _, rest = name.partition(".")
        if top == PACKAGE:
            imported = rest.partition(".")[0]
            # `from megatron_fssdp import x` may name something of the top level itself.
            allowed = imported in inner or imported == layer or (imported not in LAYERS and layer == "cli")
        elif top in sys.stdlib_module_names:
            allowed = top not in FORBIDDEN.get(layer, ())
        else:
            allowed = top in outer
        if not allowed:
            found.append(f"{'/'.join(parts)}:{line}: {layer} must not import {name}")
        elif top == PACKAGE and imported == layer:
            sub_room = sub_room_of(rest.split(".")[1:], sub_rooms)
            if sub_room not in {own_sub_room, *sub_rooms[own_sub_room]}:
                found.append(f"{'/'.join(parts)}:{line}: {layer}/{own_sub_room} must not import {name}")
    if layer in NO_ENVIRONMENT:
        found += [
            f"{'/'.join(parts)}:{node.lineno}: {layer} must not read the environment"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        ]
    return found


FILES = sorted(path.relative_to(ROOT).parts for path in ROOT.rglob("*.py"))


@pytest.mark.parametrize("layer", sorted({layer_of(parts) for parts in FILES}))
def test_imports_keep_to_the_table(layer: str) -> None:
    found = [
        violation
        for parts in FILES
        if layer_of(parts) == layer
        for violation in violations(ROOT.joinpath(*parts).read_text(encoding="utf-8"), parts)
    ]
    assert not found, "\n".join(found)


def test_the_table_has_no_cycle() -> None:
    """No package imports a higher one: the packages can be ordered."""
    left = dict(LAYERS)
    while left:
        lowest = [layer for layer, (inner, _) in left.items() if not inner & set(left)]
        assert lowest, f"these import each other: {sorted(left)}"
        for layer in lowest:
            del left[layer]


@pytest.mark.parametrize(
    ("parts", "source"),
    [
        (("planning", "x.py"), "import torch"),
        (("planning", "x.py"), "import time"),
        (("planning", "x.py"), "from megatron_fssdp.strategies.strategy import LayerPlan"),
        (("planning", "x.py"), "from megatron_fssdp import strategies"),
        (("planning", "cost", "x.py"), "from ...runtime.layers import slot_layer"),
        (("planning", "__init__.py"), "from ..runtime import slot_layer"),
        (("strategies", "x.py"), "def plan():\n    import torch.distributed as dist"),
        (("strategies", "x.py"), "import os\nx = os.environ['X']"),
        (("config", "x.py"), "import numpy"),
        (("collectives", "x.py"), "import megatron.core"),
        (("collectives", "x.py"), "from megatron_fssdp.strategies.strategy import Strategy"),
        (("collectives", "x.py"), "import os\nx = os.environ.get('X')"),
        (
            ("runtime", "x.py"),
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megatron.core import x",
        ),
        (("runtime", "x.py"), "from ..megatron_adapter import moe_layer"),
        (("runtime", "x.py"), "from megatron_fssdp.dispatchers import deduplicated"),
        (("dispatchers", "x.py"), "from megatron_fssdp.strategies.layer_plan import LayerPlan"),
        (("runtime", "x.py"), "import importlib\nimportlib.import_module('megatron.core')"),
        (("reporting", "x.py"), "try:\n    import torch\nexcept ImportError:\n    pass"),
        (("megatron_adapter", "x.py"), "from megatron_fssdp.cli.app import main"),
        (("megatron_adapter", "x.py"), "from megatron_fssdp import cli"),
        (("data", "x.py"), "import torch"),
        (("fresh_package", "x.py"), ""),
        (("planning", "fresh_sub_room", "x.py"), ""),
        (("planning", "placement", "x.py"), "from megatron_fssdp.planning.cost.cost_model import LinkCost"),
        (("planning", "placement", "x.py"), "from ..cost import cost_model"),
        (("planning", "placement", "x.py"), "from megatron_fssdp.planning import cost"),
        (("planning", "x.py"), "from megatron_fssdp.planning.papers import calibration"),
        (("megatron_adapter", "layer", "x.py"), "def f():\n    from ..training import training_hooks"),
        (("strategies", "fssdp.py"), "from megatron_fssdp.strategies.papers.prophet import ProphetStrategy"),
    ],
)
def test_the_checker_catches_a_planted_violation(parts: tuple[str, ...], source: str) -> None:
    assert violations(source, parts)


@pytest.mark.parametrize(
    ("parts", "source"),
    [
        (("planning", "x.py"), "import numpy as np\nfrom functools import cache\nfrom .y import z"),
        (("planning", "cost", "x.py"), "from ..placement import topology\nfrom ...config import errors"),
        (("planning", "cost", "x.py"), "from .cost_model import LinkCost"),
        (("runtime", "__init__.py"), "from . import slot_layer\nfrom ..planning import placement"),
        (("megatron_adapter", "x.py"), "def f():\n    from megatron_fssdp.runtime import moe_runtime"),
    ],
)
def test_the_checker_accepts_imports_that_the_table_allows(parts: tuple[str, ...], source: str) -> None:
    assert not violations(source, parts)
