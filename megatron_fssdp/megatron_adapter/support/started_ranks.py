"""Whether somebody has started this process as one of a training's ranks."""

import os

import torch.distributed as dist

from megatron_fssdp.config.errors import ConfigurationError

_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


def check_started_as_rank() -> None:
    """Raise where Megatron could not find the other ranks, however many there are.

    Raises:
        ConfigurationError: torchrun's variables are missing.
    """
    missing = [name for name in _RENDEZVOUS if not os.environ.get(name)]
    if missing and not dist.is_initialized():
        raise ConfigurationError(
            f"no ranks: {' and '.join(missing)} not set, wanted a process that torchrun has started; use "
            "torchrun --standalone --nproc-per-node=N -m megatron_fssdp SCRIPT.py ARGS…"
        )
