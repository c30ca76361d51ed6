"""What only Megatron-LM's training loop has: its end, and its failures.

One line says where and why a training stopped, and from which checkpoint it can resume.
"""

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training.global_vars import get_args

from megatron_fssdp.megatron_adapter.iterations.attachment import current

logger = logging.getLogger(__name__)

_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron writes this file when a checkpoint is complete.


def train_and_tell(train: Any, *args: Any, **kwargs: Any) -> Any:
    """Train, and say at the end how even the loads were; an error is logged with its place."""
    attachment = current()
    # Models that are only evaluated are none of ours, and none has nothing to say.
    model = next(iter(attachment.models), None) if attachment is not None else None
    if model is None or model.session is None:
        return train(*args, **kwargs)
    try:
        return train(*args, **kwargs)
    finally:
        error = sys.exception()
        if isinstance(error, Exception):
            report_stop(get_args(), error)
        elif model.driver is not None:
            model.driver.tell_end()


def report_stop(args: Any, error: Exception) -> None:
    """Log one line about an error that ends the training."""
    places = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    reason = (str(error).strip() or "no message").splitlines()[0]
    logger.error(
        # The iteration is numbered as in Megatron's log.
        f"[fssdp] rank {dist.get_rank()} stopped in iteration {args.curr_iteration + 1}{places}: "
        f"{type(error).__name__}: {reason}. If another rank stopped earlier, its log has the cause. "
        f"{how_to_go_on(args)}"
    )


def how_to_go_on(args: Any) -> str:
    """Return a sentence that names the checkpoint from which the training can resume."""
    for folder in filter(None, (args.save, args.load)):
        with suppress(OSError, ValueError):  # A damaged file must not hide why the training stopped.
            iteration = (Path(folder) / _TRACKER).read_text().strip()
            return f"The last complete checkpoint is of iteration {iteration}: restart with --load {folder}"
    return "No checkpoint has been completed: set --save and --save-interval to be able to resume"
