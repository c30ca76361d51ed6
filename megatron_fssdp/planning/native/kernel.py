"""Calls the planning kernels in one of two forms, the same form for all: compiled, or as plain Python.

The first call of a kernel decides. Compiled kernels are used if every kernel has a compiled file that was
made from its present source (:mod:`.kernel_files`). Both forms run the same source and add floats in the same
order, so their results are equal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any
from weakref import WeakSet

import numpy as np

from megatron_fssdp.planning.native.kernel_files import kernel_files

REBUILD = "python scripts/compile_kernels.py"
"""Command that compiles the kernels of a checkout."""


@dataclass(frozen=True)
class KernelForm:
    """The form in which kernels run in this process.

    Attributes:
        is_compiled: Whether compiled kernels run.
        reason: Why they do not run; empty if they do.
    """

    is_compiled: bool
    reason: str = ""

    def __str__(self) -> str:
        return "compiled" if self.is_compiled else f"plain Python ({self.reason})"


class Kernel:
    """A function of a kernel's source, called in the form that all kernels have.

    Attributes:
        plain: The function, imported from the module of :mod:`megatron_fssdp.planning.kernels`.
    """

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain = plain
        self._run: Callable[..., Any] = self._decide
        _kernels.add(self)

    def __call__(self, *arguments: Any) -> Any:
        """Run the kernel.

        Args:
            arguments: What the function takes, by position. Arrays are numpy arrays in C order.

        Raises:
            ValueError: An array has another data type or order.
        """
        return self._run(*arguments)

    def select_form(self, is_compiled: bool) -> None:
        """Run one form from now on.

        Args:
            is_compiled: Whether to run the compiled form. Its file must exist.
        """
        self._run = self._find_compiled() if is_compiled else self._run_plain

    def _decide(self, *arguments: Any) -> Any:
        self.select_form(kernel_form().is_compiled)
        return self._run(*arguments)

    def _run_plain(self, *arguments: Any) -> Any:
        return self.plain(*(_view(a) if isinstance(a, np.ndarray) else a for a in arguments))

    def _find_compiled(self) -> Callable[..., Any]:
        source = self.plain.__module__.rpartition(".")[2]
        found: Callable[..., Any] = getattr(_compiled_modules()[source], self.plain.__name__)
        return found


def _view(array: np.ndarray) -> memoryview:
    """The array as a plain kernel gets it.

    Items of a memoryview are Python numbers. Python computes several times as fast with them as with numpy's.

    Raises:
        ValueError: A compiled kernel would refuse the array.
    """
    if array.dtype not in (np.int64, np.float64, np.uint8) or not array.flags.c_contiguous:
        raise ValueError(
            f"got an array of {array.dtype} with strides {array.strides} for a kernel: wanted int64, "
            "float64 or uint8 in C order"
        )
    return memoryview(array)


_kernels: WeakSet[Kernel] = WeakSet()
_form: KernelForm | None = None
_modules: dict[str, ModuleType] = {}  # compiled modules by the name of their source


def kernel_form() -> KernelForm:
    """The form in which kernels run. The first call finds out."""
    global _form
    if _form is None:
        _form = _find_form()
    return _form


def use_plain_kernels(reason: str) -> None:
    """Run all kernels as plain Python from now on.

    Args:
        reason: Why, for the log.
    """
    set_form(KernelForm(False, reason))


def set_form(form: KernelForm | None) -> None:
    """Run all kernels in one form; ``None`` lets the next call decide."""
    global _form
    _form = form
    for kernel in _kernels:
        kernel._run = kernel._decide


def _find_form() -> KernelForm:
    files = kernel_files()
    missing = [file.source.stem for file in files if not file.compiled.is_file()]
    if len(missing) == len(files):
        others = any(files[0].compiled.parent.glob("*")) if files else False
        return KernelForm(False, "compiled from other sources" if others else "not compiled")
    if missing:
        return KernelForm(False, f"not compiled from the present source: {', '.join(missing)}")
    try:
        _compiled_modules()
    except ImportError as error:
        return KernelForm(False, f"the compiled kernels cannot be loaded: {error}")
    return KernelForm(True)


def _compiled_modules() -> dict[str, ModuleType]:
    """Compiled modules by the name of their source, loaded once.

    Raises:
        ImportError: A compiled module cannot be loaded on this machine.
    """
    if not _modules:
        found = {}
        for file in kernel_files():
            spec = spec_from_file_location(file.module, file.compiled)
            if spec is None or spec.loader is None:
                raise ImportError(f"{file.compiled} is not an extension module")
            found[file.source.stem] = module = module_from_spec(spec)
            spec.loader.exec_module(module)
        _modules.update(found)
    return _modules
