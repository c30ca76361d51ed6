"""One line in the log about where a training stopped and how it goes on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron writes it when a checkpoint is complete


@contextmanager
def reporting_stop(args: Any) -> Iterator[None]:
    """Log one line when the training that runs inside raises.

    Args:
        args: Megatron's arguments.
    """
    try:
        yield
    except Exception as error:
        places = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        reason = (str(error).strip() or "no message").splitlines()[0]
        logger.error(
            f"[fssdp] rank {dist.get_rank()} stopped in iteration {running_iteration(args)}{places}: "
            f"{type(error).__name__}: {reason}. If another rank stopped before, its log has the cause. "
            f"{how_to_go_on(args)}"
        )
        raise


def report_non_finite(args: Any, finding: str) -> None:
    """Log where non-finite numbers came up.

    Args:
        args: Megatron's arguments.
        finding: What was found.
    """
    logger.error(
        f"[fssdp] error on rank {dist.get_rank()}: iteration {running_iteration(args)}: {finding}. "
        f"{how_to_go_on(args)}"
    )


def running_iteration(args: Any) -> int:
    """The running iteration as Megatron's log counts it, from 1.

    Args:
        args: Megatron's arguments.
    """
    return int(args.curr_iteration) + 1


def how_to_go_on(args: Any) -> str:
    """Which checkpoint to restart from.

    Args:
        args: Megatron's arguments.
    """
    for folder in (args.save, args.load):
        with suppress(OSError, ValueError):  # a damaged tracker must not hide why training stopped
            if folder:
                iteration = (Path(folder) / _TRACKER).read_text().strip()
                return (
                    f"The last complete checkpoint is of iteration {iteration}: restart with --load {folder}"
                )
    return "No checkpoint has been completed (--save, --save-interval)"
