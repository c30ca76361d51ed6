"""Kernels of Triton on the virtual device: its interpreter runs them, and each is one launch."""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

from devtools.virtual_cuda.books.virtual_device import VirtualDevice


def kernel_members(books: VirtualDevice) -> dict[str, Any]:
    """Members of interpreted functions. A kernel writes to the arguments whose names begin with ``out_``."""
    run = InterpretedFunction.run

    def posed(function: Any, *args: Any, **options: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            result = run(function, *args, **options)
        named = [
            (name, arg) for name, arg in zip(function.arg_names, args, strict=True) if isinstance(arg, Tensor)
        ]
        reads, writes = (
            [arg for name, arg in named if name.startswith("out_") == out] for out in (False, True)
        )
        books.launch(function.fn.__name__, reads, writes)
        return result

    return {"run": posed}


@cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
    """As ``interpreter._patch_builtin``, which searches Triton's language at each call of a function."""
    for name, member in _builtins(package):
        if getattr(package, name) is member:
            interpreter._patch_attr(package, name, member, builder, scope)


interpreter._patch_builtin = patch_builtins
