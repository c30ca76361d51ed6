"""Checks that a launcher such as torchrun started this process as a rank of a training."""

import os

import torch.distributed as dist

from megatron_fssdp.config.errors import ConfigurationError

_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


def check_started_as_rank() -> None:
    """Raise if Megatron could not find the other ranks. A single rank needs the launcher too.

    Raises:
        ConfigurationError: Environment variables that torchrun sets are missing.
    """
    missing = [name for name in _RENDEZVOUS if not os.environ.get(name)]
    if missing and not dist.is_initialized():
        raise ConfigurationError(
            f"no ranks: {' and '.join(missing)} not set, wanted a process that torchrun has started; run "
            "torchrun --standalone --nproc-per-node=N -m megatron_fssdp SCRIPT.py ARGS…"
        )
