"""Logs one line about where a training stopped, and from which checkpoint it can resume."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron writes this file when a checkpoint is complete.


@contextmanager
def reporting_stop(args: Any) -> Iterator[None]:
    """Log one line if the code inside this context raises; the error is then raised again."""
    try:
        yield
    except Exception as error:
        places = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        reason = (str(error).strip() or "no message").splitlines()[0]
        logger.error(
            f"[fssdp] rank {dist.get_rank()} stopped in iteration {_running_iteration(args)}{places}: "
            f"{type(error).__name__}: {reason}. If another rank stopped earlier, its log has the cause. "
            f"{how_to_go_on(args)}"
        )
        raise


def report_non_finite(args: Any, finding: str) -> None:
    """Log one line with a sentence that names the place where NaN or infinity appeared first."""
    logger.error(
        f"[fssdp] error on rank {dist.get_rank()}: iteration {_running_iteration(args)}: {finding}. "
        f"{how_to_go_on(args)}"
    )


def _running_iteration(args: Any) -> int:
    return int(args.curr_iteration) + 1  # as in Megatron's log


def how_to_go_on(args: Any) -> str:
    """Return a sentence that names the checkpoint from which the training can resume."""
    for folder in (args.save, args.load):
        # A damaged file must not hide why the training stopped.
        with suppress(OSError, ValueError):
            if folder:
                iteration = (Path(folder) / _TRACKER).read_text().strip()
                return (
                    f"The last complete checkpoint is of iteration {iteration}: restart with --load {folder}"
                )
    return "No checkpoint has been completed: set --save and --save-interval to be able to resume"
