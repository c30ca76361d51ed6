"""Bad input as one clear line and exit code 2, whichever way a script got the plugin."""

import os
import sys
from types import TracebackType
from typing import TextIO

from megatron_fssdp.config.errors import ConfigurationError

EXIT_BAD_INPUT = 2


def report(error: ConfigurationError, to: TextIO | None = None) -> None:
    """Print one line. Before process groups exist all ranks see the same error: rank 0 speaks.

    Args:
        error: What to say.
        to: Where; by default standard error.
    """
    import torch.distributed as dist

    rank = int(os.environ.get("RANK", 0))
    if dist.is_initialized():
        print(f"[fssdp] error on rank {rank}: {error}", file=to or sys.stderr, flush=True)
    elif rank == 0:
        print(f"[fssdp] error: {error}", file=to or sys.stderr, flush=True)


def report_uncaught() -> None:
    """End a script that lets a :class:`ConfigurationError` through as the launcher would, by one line."""
    before = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, ConfigurationError):
            before(kind, error, traceback)
            return
        # Not sys.stderr: torch.distributed's own hook holds that back until this one returns.
        report(error, sys.__stderr__)
        sys.exit(EXIT_BAD_INPUT)  # the interpreter ends with the code that its hook exits with

    sys.excepthook = end
