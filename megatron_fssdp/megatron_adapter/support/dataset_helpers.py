"""Megatron's compiled dataset helpers, from wherever they are."""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress


def compilation_if_needed(original: Callable[[], None]) -> Callable[[], None]:
    """Return a function that does nothing if there are compiled helpers; otherwise the original.

    Every training asks rank 0 to run ``make``. The megatron-core wheel has the helpers, but no Makefile. A
    checkout has only a Makefile, which needs pybind11 and a compiler; the wheel's helpers work with it, too.
    """
    name = "megatron.core.datasets.helpers_cpp"
    with suppress(ImportError):
        importlib.import_module(name)
        return lambda: None
    with suppress(ImportError):  # not installed, or compiled for another Python
        for file in importlib.metadata.files("megatron-core") or ():
            if file.name.startswith("helpers_cpp.") and file.suffix == ".so":
                spec = importlib.util.spec_from_file_location(name, str(file.locate()))
                assert spec and spec.loader  # noqa: PT018  a file has both
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                sys.modules[name] = module
                return lambda: None
    return original
