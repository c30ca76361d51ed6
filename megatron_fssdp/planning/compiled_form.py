"""Finds the kernels of planning in their compiled form, or as plain Python, and says which it is.

All of them run in the same form, because they inherit from each other. Python prefers an extension module to
the source beside it, so one that is older must not be used.
"""

import importlib
import importlib.util
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from hashlib import blake2b
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).with_name("kernels")
NAMES = (
    "constants",
    "transfer_trees",
    "price_formula",
    "layer_traffic",
    "priced_layer",
    "placement_descent",
    "placement_search",
    "greedy_planners",
    "token_shares",
)
"""The kernels; each one follows those that it imports."""

REBUILD = "python setup.py build_ext --inplace"
"""Command that compiles the kernels of a checkout."""


def kernel(name: str) -> ModuleType:
    """One of the modules with kernels, by its name in :data:`NAMES`."""
    return _kernels()[0][name]


TIMES_SLOWER = 100
"""About how much longer the kernels take as plain Python."""


def is_compiled() -> bool:
    """Whether this process has compiled kernels."""
    return not _kernels()[1]


def kernel_form() -> str:
    """The form of the kernels in this process, for logs."""
    reason = _kernels()[1]
    return f"plain Python, about {TIMES_SLOWER} times slower ({reason})" if reason else "compiled"


def source_digest() -> int:
    """A number of 63 bits that is equal where the kernels have the same sources, in either form."""
    sources = b"".join(_source(name).read_bytes() for name in NAMES)
    return int.from_bytes(blake2b(sources, digest_size=8).digest()) >> 1


@lru_cache(maxsize=1)
def _kernels() -> tuple[dict[str, ModuleType], str]:
    """All kernels, and why they are plain Python. The first call decides which form runs in this process."""
    why = next(filter(None, map(_why_plain, NAMES)), "")
    if not why:
        try:
            return {name: importlib.import_module(_module_name(name)) for name in NAMES}, ""
        except ImportError as error:
            why = f"the compiled kernels cannot be loaded: {error}"
    return plain_kernels(), why


def plain_kernels() -> dict[str, ModuleType]:
    """The kernels as plain Python. They take the places of modules that were imported before."""
    modules = {}
    with _stand_in_for_cython():
        for name in NAMES:
            spec = importlib.util.spec_from_file_location(_module_name(name), _source(name))
            assert spec is not None
            assert spec.loader is not None
            modules[name] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(modules[name])
    return modules


@contextmanager
def _stand_in_for_cython() -> Iterator[None]:
    """Let the kernels run where Cython is not installed; they use three names of it."""
    if importlib.util.find_spec("cython") is not None:
        yield
        return
    stand_in: Any = ModuleType("cython")
    stand_in.nogil, stand_in.compiled = nullcontext(), False
    names = {"cython": stand_in, "cython.cimports.libc.math": math}
    sys.modules.update(names)
    yield
    for name in names:
        del sys.modules[name]


def _source(name: str) -> Path:
    return FOLDER / f"{name}.py"


def _module_name(name: str) -> str:
    return f"{__package__}.{FOLDER.name}.{name}"


def _why_plain(name: str) -> str:
    """Why the compiled form of a kernel cannot be used; empty if it can."""
    source = _source(name)
    extensions = [source.with_suffix(suffix) for suffix in EXTENSION_SUFFIXES]
    compiled = next((path for path in extensions if path.is_file()), None)
    if compiled is None:
        return "not compiled"
    # In a checkout, somebody may have changed the source since. Installed files all have the same age.
    is_checkout = (FOLDER.parents[2] / "pyproject.toml").is_file()
    if is_checkout and compiled.stat().st_mtime < source.stat().st_mtime:
        return "not compiled from the present source"
    return ""
