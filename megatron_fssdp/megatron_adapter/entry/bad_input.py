"""Invalid input of a training ends it by one line and an exit code, on whatever rank it is found."""

import os
import socket
import sys
import time
from types import TracebackType
from typing import TextIO

from megatron_fssdp.config.errors import ConfigurationError

EXIT_BAD_INPUT = 2
_FIRST_RANK_S = 60.0


def report(error: ConfigurationError, to: TextIO | None = None) -> None:
    """Print one line for an error, by default to standard error.

    Before process groups exist, all ranks of a node get the same error, and the first one there prints it,
    with the node's name if it is not that of rank 0. torchrun ends the ranks of a node when one of them ends.
    The others therefore wait for the first one, and print if it does not.
    """
    import torch.distributed as dist

    rank, is_initialized = os.environ.get("RANK", "0"), dist.is_initialized()
    local_rank = os.environ.get("LOCAL_RANK", rank)
    place = f" on rank {rank}"
    if not is_initialized and local_rank == "0":
        place = "" if rank == "0" else f" on {socket.gethostname()}"
    elif not is_initialized:
        if "LOCAL_RANK" not in os.environ:
            return
        time.sleep(_FIRST_RANK_S)
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
