"""Finds the kernels of planning in their compiled form, or as plain Python, and says which it is.

Python prefers the extension module beside ``kernels.py``, so one older than it must not be used.
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

SOURCE = Path(__file__).with_name("kernels.py")

REBUILD = "python setup.py build_ext --inplace"
"""Command that compiles the kernels of a checkout."""


@lru_cache(maxsize=1)
def kernels() -> ModuleType:
    """The module with the kernels. The first call decides which form runs in this process."""
    name = f"{__package__}.{SOURCE.stem}"
    why = _why_plain()
    if not why:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            why = f"the compiled kernels cannot be loaded: {error}"
    spec = importlib.util.spec_from_file_location(name, SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with _stand_in_for_cython():
        spec.loader.exec_module(module)
    module.REASON = why  # type: ignore[attr-defined]
    return module


@contextmanager
def _stand_in_for_cython() -> Iterator[None]:
    """Let the kernels run where Cython is not installed; they use two names of it."""
    if importlib.util.find_spec("cython") is not None:
        yield
        return
    stand_in: Any = ModuleType("cython")
    stand_in.nogil = nullcontext()
    names = {"cython": stand_in, "cython.cimports.libc.math": math}
    sys.modules.update(names)
    yield
    for name in names:
        del sys.modules[name]


def kernel_form() -> str:
    """The form of the kernels in this process, for logs."""
    reason = getattr(kernels(), "REASON", "")
    return f"plain Python, about 100 times slower ({reason})" if reason else "compiled"


def source_digest() -> int:
    """A number of 63 bits that is equal where the kernels have the same source, in either form."""
    return int.from_bytes(blake2b(SOURCE.read_bytes(), digest_size=8).digest()) >> 1


def _why_plain() -> str:
    """Why the compiled form cannot be used; empty if it can."""
    found = [SOURCE.with_suffix(suffix) for suffix in EXTENSION_SUFFIXES]
    compiled = next((path for path in found if path.is_file()), None)
    if compiled is None:
        return "not compiled"
    # In a checkout, somebody may have changed the source since. Installed files all have the same age.
    is_checkout = (SOURCE.parents[2] / "pyproject.toml").is_file()
    if is_checkout and compiled.stat().st_mtime < SOURCE.stat().st_mtime:
        return "not compiled from the present source"
    return ""
