"""Kernels of Triton on the virtual device: its interpreter runs them, and each is one launch."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from devtools.virtual_cuda.books.virtual_device import VirtualDevice


def kernel_members(books: VirtualDevice) -> dict[str, Any]:
    """Members of interpreted functions. A kernel writes to the arguments whose names begin with ``out_``."""
    run = InterpretedFunction.run

    def posed(function: Any, *args: Any, **options: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            result = run(function, *args, **options)
        named = [
            (name, one) for name, one in zip(function.arg_names, args, strict=True) if isinstance(one, Tensor)
        ]
        reads, writes = (
            [one for name, one in named if name.startswith("out_") == out] for out in (False, True)
        )
        books.launch(function.fn.__name__, reads, writes)
        return result

    return {"run": posed}
