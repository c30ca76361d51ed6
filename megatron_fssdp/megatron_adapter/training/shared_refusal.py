"""Refuses a run on all ranks when one rank finds a reason."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron_fssdp.config.errors import ConfigurationError


@contextmanager
def refused_together() -> Iterator[None]:
    """Raise on all ranks what some of them raise inside. Collective: all ranks of the training enter it.

    Without it, the other ranks would end with the traceback of a lost connection, or wait.

    Raises:
        ConfigurationError: A rank raised it inside. Each rank that raised none gets the message of the lowest
            rank that did.
    """
    reason: ConfigurationError | None = None
    try:
        yield
    except ConfigurationError as error:
        reason = error
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if reason is None else str(reason))
    first = next((message for message in messages if message is not None), None)
    if first is not None:
        raise reason or ConfigurationError(first)
