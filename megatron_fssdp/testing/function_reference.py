"""Picklable references to module-level functions: module name, source file and qualified name."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class FunctionReference:
    """Reference to a module-level function, from which this or another process can find the function.

    Another process cannot import the module names of test files that pytest imported. Therefore the reference
    includes the source file, which is then imported by its path.

    Attributes:
        module: Name under which the function's module is registered.
        path: Path of the module's source file, or None for modules without one.
        qualname: Qualified name of the function inside the module. Static methods are allowed.
    """

    module: str
    path: str | None
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "FunctionReference":
        """Return a reference to ``function``.

        Raises:
            ValueError: Another process could not find the function, because it is not at the top of a module.
        """
        module_name = getattr(function, "__module__", None)
        qualname = getattr(function, "__qualname__", None)
        module = sys.modules.get(module_name) if module_name else None
        if module is None or qualname is None:
            raise ValueError(
                f"run_ranks: got {function!r}, wanted a function at the top of a module; write a "
                "module-level function and pass its data as arguments"
            )
        if "<" in qualname or _lookup(module, qualname) is not function:
            raise ValueError(
                f"run_ranks cannot send {module_name}.{qualname} to other processes, because it is a "
                "closure, a lambda, a bound method, or hidden by a decorator; move it to the top of its "
                "module and pass captured values as arguments"
            )
        path = getattr(module, "__file__", None)
        return cls(module.__name__, str(Path(path).resolve()) if path else None, qualname)

    def resolve(self) -> Callable[..., Any]:
        """Return the function. Its module is imported first if necessary.

        Raises:
            ImportError: The module cannot be imported or does not have the function.
        """
        function = _lookup(self._import(), self.qualname)
        if function is None:
            raise ImportError(f"{self.module} ({self.path}) has no {self.qualname}")
        return function

    def _import(self) -> ModuleType:
        if self.module == "__main__" and self.path is not None:
            # The caller is a script. It is imported under another name, so that its main block does not run.
            # The alias lets both sides resolve pickles that name __main__.
            module = _import_file("__rank_main__", self.path)
            sys.modules["__main__"] = module
            return module
        if self.module in sys.modules:
            return sys.modules[self.module]
        if self.path is None or self._importable():
            return importlib.import_module(self.module)
        _register_parents(self.module, Path(self.path))
        return _import_file(self.module, self.path)

    def _importable(self) -> bool:
        try:
            spec = importlib.util.find_spec(self.module)
        except (ImportError, ValueError):
            return False
        return spec is not None and spec.origin is not None and str(Path(spec.origin).resolve()) == self.path


def _lookup(module: ModuleType, qualname: str) -> Any:
    value: Any = module
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return value


def _import_file(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path} as {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _register_parents(module: str, path: Path) -> None:
    """Register ``a`` and ``a.b`` of ``a.b.c`` in sys.modules, because pickle imports parent modules."""
    parents = module.split(".")[:-1]
    for depth in range(len(parents), 0, -1):
        name = ".".join(parents[:depth])
        path = path.parent
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(path)]
            sys.modules[name] = package
