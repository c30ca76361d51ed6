"""Which room of docs/architecture.md may import which, and which sub-room.

No files of the package import each other in a circle. Every import statement counts: at the top of a file, in
a function, and under ``if TYPE_CHECKING``.
"""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import megatron_fssdp
from tests.support.tables import cells

PACKAGE = "megatron_fssdp"
ROOT = Path(megatron_fssdp.__file__).parent


# A room, the rooms that it may import, and packages from elsewhere. The standard library is allowed but where
# FORBIDDEN says no. "config" asks Megatron's argument parser for the keys of a run's YAML.
LAYERS = {
    room: (set(inner.split()), set(outer.split()))
    for room, inner, outer in cells("""
    config | | pydantic pydantic_core yaml megatron
    files | config | pydantic
    planning | config | numpy cython
    strategies | planning config | numpy pydantic
    systems | strategies planning config | numpy
    simulation | systems strategies planning config | numpy
    collectives | planning | torch
    dispatchers | collectives planning config | torch numpy megatron
    runtime | collectives strategies planning | torch triton numpy
    records | config files | numpy pydantic pydantic_core
    report | records files planning systems simulation config | numpy rich jinja2 markupsafe plotly
    data | config files | numpy tokenizers huggingface_hub megatron
    testing | | torch megatron
    megatron_adapter | config files planning strategies simulation collectives dispatchers runtime records
        | numpy torch megatron
    pretraining | config data megatron_adapter | megatron torch
    launch | config files data records megatron_adapter | torch rich
    cli | config files planning strategies systems simulation records report data megatron_adapter launch
        | numpy torch typer rich pydantic pydantic_core psutil packaging
    <top> | config megatron_adapter cli |
    """)
}

# A room, some of its sub-rooms, and which of the others each of them may import. A dot stands for the files
# that lie directly in the room.
SUB_ROOMS = {}
for room, names, allowed in cells("""
    planning | . | placement transfer dispatch cost
    planning | placement | .
    planning | transfer dispatch | . placement
    planning | cost | . placement transfer dispatch
    planning | kernels | . placement cost
    strategies | . |
    strategies | none ep fssdp prophet fastermoe quota flexmoe parm | .
    strategies | smartmoe auto | . ep
    config | . |
    config | strategy | .
    config | run | . strategy
    collectives | . |
    collectives | sparse | .
    dispatchers | . | parm
    dispatchers | parm |
    runtime | . |
    runtime | experts | .
    runtime | slots | . experts
    runtime | clocks | . slots
    runtime | layers | . experts slots clocks
    megatron_adapter | . |
    megatron_adapter | experts support | .
    megatron_adapter | cpu | . support
    megatron_adapter | routing diagnosis | . experts cpu support
    megatron_adapter | checkpoints | . experts cpu support layer
    megatron_adapter | layer | . experts cpu support routing
    megatron_adapter | iterations | . experts cpu support checkpoints layer
    megatron_adapter | training | . layer iterations
    megatron_adapter | entry | . cpu support checkpoints layer iterations training
    cli | . | analysis doctor
    cli | analysis doctor | .
    """):
    of_room = SUB_ROOMS.setdefault(room, {})
    of_room |= {name.strip("."): {sub.strip(".") for sub in allowed.split()} for name in names.split()}

FORBIDDEN = {
    "planning": {"time", "datetime", "random", "os", "argparse", "threading"},
    "strategies": {"time", "datetime", "random", "os", "argparse", "threading"},
    "systems": {"time", "datetime", "random", "os", "argparse"},
    "simulation": {"time", "datetime", "random", "os", "argparse"},
}
"""Parts of the standard library that would make a plan depend on more than its arguments."""

# An import of a type alone: Parameters lead to their model, and the model looks for its optimizer by them.
CIRCLES = {
    tuple(f"{PACKAGE}.megatron_adapter.iterations.{name}" for name in ("host_settings", "model_iterations"))
}
"""Imports that close circles between files."""

# Below the adapter the global process groups stay untouched, and environment variables unread.
NO_ENVIRONMENT = {"collectives", "runtime", "planning", "strategies", "systems", "simulation"}


def imports_of(tree, module, is_package):
    """Line and absolute name of everything a module imports; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: None if is_package else -1]
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            yield from (
                (node.lineno, str(name.value)) for name in node.args if isinstance(name, ast.Constant)
            )


def violations(source, parts):
    """Imports that the table does not allow, of a file with this path below the package."""
    layer = parts[0] if len(parts) > 1 else "<top>"
    own_sub_room = parts[1] if len(parts) > 2 else ""
    sub_rooms = SUB_ROOMS.get(layer, {"": set()})
    if layer not in LAYERS or own_sub_room not in sub_rooms:
        return [f"{layer}/{own_sub_room} is not in the table: add it to docs/architecture.md and here"]
    inner, outer = LAYERS[layer]
    module = ".".join([PACKAGE, *parts]).removesuffix(".py").removesuffix(".__init__")
    tree = ast.parse(source)
    problems = []
    for line, name in imports_of(tree, module, parts[-1] == "__init__.py"):
        top, *rest = name.split(".")
        if top == PACKAGE and rest[:1] == [layer]:
            sub_room = rest[1] if len(rest) > 1 and rest[1] in sub_rooms else ""
            allowed = sub_room in {own_sub_room, *sub_rooms[own_sub_room]}
        elif top == PACKAGE:
            # `from megatron_fssdp import x` may name something of the top level itself.
            allowed = rest[0] in inner or (rest[0] not in LAYERS and layer in ("cli", "<top>"))
        else:
            allowed = top in outer or (top in sys.stdlib_module_names and top not in FORBIDDEN.get(layer, ()))
        if not allowed:
            problems.append(f"{'/'.join(parts)}:{line}: {layer}/{own_sub_room} must not import {name}")
    if layer in NO_ENVIRONMENT:
        problems += [
            f"{'/'.join(parts)}:{node.lineno}: {layer} must not read the environment"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        ]
    return problems


def test_imports_keep_to_the_table():
    files = {path: path.relative_to(ROOT).parts for path in ROOT.rglob("*.py")}
    lines = [line for path, parts in files.items() for line in violations(path.read_text("utf-8"), parts)]
    assert not lines, "\n".join(lines)


def test_the_table_has_no_cycle():
    """No package imports a higher one: the packages can be ordered."""
    TopologicalSorter({layer: inner for layer, (inner, _) in LAYERS.items()}).prepare()


def files_imported(sources):
    """The modules of the package that each one imports, of sources by module with whether it is a package."""
    graph = {}
    for module, (source, is_package) in sources.items():
        names = [name for _, name in imports_of(ast.parse(source), module, is_package)]
        graph[module] = {mod if mod in sources else mod.rpartition(".")[0] for mod in names} & set(sources)
    return {module: imported - {module} for module, imported in graph.items()}


def test_no_files_import_each_other_in_a_circle():
    sources = {}
    for path in ROOT.rglob("*.py"):
        parts = (PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        sources[".".join(parts[:-1] if is_package else parts)] = path.read_text("utf-8"), is_package
    imported = files_imported(sources)
    for module, target in CIRCLES:
        imported[module].remove(target)  # An error if there is no such import any more.
    TopologicalSorter(imported).prepare()


def test_a_circle_of_types_alone_is_found():
    circle = {
        "p": ("", True),
        "p.a": ("from p import b", False),
        "p.b": ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .c import C", False),
    }
    TopologicalSorter(files_imported({**circle, "p.c": ("import os", False)})).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(files_imported({**circle, "p.c": ("def f():\n    import p.a", False)})).prepare()


@pytest.mark.parametrize(
    ("path", "source", "is_allowed"),
    [
        ("planning/x.py", "import numpy as np\nfrom functools import cache\nfrom .y import z", True),
        ("planning/x.py", "import time", False),
        ("planning/x.py", "from megatron_fssdp.strategies.strategy import LayerPlan", False),
        ("planning/cost/x.py", "from ..placement import topology\nfrom ...config import errors", True),
        ("planning/cost/x.py", "from ...runtime.layers import slot_layer", False),
        ("planning/placement/x.py", "from ..cost import cost_model", False),
        ("planning/placement/x.py", "from megatron_fssdp.planning import cost", False),
        ("planning/fresh_sub_room/x.py", "", False),
        ("fresh_package/x.py", "", False),
        ("runtime/__init__.py", "from . import slot_layer\nfrom ..planning import placement", True),
        ("runtime/x.py", "def f():\n    from megatron.core import x", False),
        ("runtime/x.py", "import importlib\nimportlib.import_module('megatron.core')", False),
        ("strategies/x.py", "import os\nx = os.environ['X']", False),
        ("megatron_adapter/x.py", "from megatron_fssdp import cli", False),
    ],
)
def test_the_checker_knows_what_is_allowed(path, source, is_allowed):
    assert bool(violations(source, tuple(path.split("/")))) != is_allowed
