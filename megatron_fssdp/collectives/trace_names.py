"""Names of what the plugin does, in traces of torch's profiler and, by ``emit_nvtx``, of Nsight Systems."""

from collections.abc import Callable
from functools import wraps

import torch
from torch.autograd.profiler import record_function


def traced[**Given, Result](name: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Decorate a function whose calls are ``fssdp NAME`` in traces. Without a profiler, it is just called."""

    def decorate(call: Callable[Given, Result]) -> Callable[Given, Result]:
        @wraps(call)
        def named(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            if not torch.autograd._profiler_enabled():
                return call(*args, **kwargs)
            with record_function(f"fssdp {name}"):
                return call(*args, **kwargs)

        return named

    return decorate
