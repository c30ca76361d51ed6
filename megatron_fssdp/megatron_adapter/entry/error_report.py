"""Reports invalid input as one line and exit code 2, however a script loaded the plugin."""

import os
import sys
from types import TracebackType
from typing import TextIO

from megatron_fssdp.config.errors import ConfigurationError

EXIT_BAD_INPUT = 2


def report(error: ConfigurationError, to: TextIO | None = None) -> None:
    """Print one line for an error, by default to standard error.

    Before process groups exist, all ranks get the same error and only rank 0 prints it. Afterwards every
    rank prints its own.
    """
    import torch.distributed as dist

    rank, is_initialized = int(os.environ.get("RANK", 0)), dist.is_initialized()
    if is_initialized or rank == 0:
        place = f" on rank {rank}" if is_initialized else ""
        print(f"[fssdp] error{place}: {error}", file=to or sys.stderr, flush=True)


def report_uncaught() -> None:
    """Make scripts that do not catch a :class:`ConfigurationError` end with one line and exit code 2."""
    before = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, ConfigurationError):
            before(kind, error, traceback)
            return
        # torch.distributed's own hook holds sys.stderr back until this hook returns.
        report(error, sys.__stderr__)
        sys.exit(EXIT_BAD_INPUT)  # The interpreter ends with the exit code of its hook.

    sys.excepthook = end
