"""The process group of SparseAllGather and SparseReduceScatter on GPUs: its NCCL options and connections."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fssdp.collectives.messages import connect_pairs
from megatron_fssdp.config.loading import load_yaml

SHORT_NAME = "fssdp"
"""Name of the group in Megatron's file of NCCL options (``--nccl-communicator-config-path``)."""

# Transfers run beside compute, and Megatron's documentation recommends streams of high priority for this:
# their kernels are scheduled before those of the compute. All other options are NCCL's defaults.
DEFAULT_OPTIONS = {"is_high_priority_stream": True}


def nccl_options(args: Any) -> dict[str, Any]:
    """Return the transfer group's NCCL options, with those of the file that Megatron's arguments name."""
    path = args.nccl_communicator_config_path
    return DEFAULT_OPTIONS | ((load_yaml(path).get(SHORT_NAME) if path else None) or {})


def create_transfer_group(
    expert_parallel: dist.ProcessGroup, timeout: timedelta | None, options: dict[str, Any]
) -> dist.ProcessGroup:
    """Create a second process group of the expert-parallel ranks; collective over these ranks.

    Megatron's function creates it, because Megatron may change the time-outs of all groups that it has
    created. Without a time-out, the group has torch's default.

    Where the default group is bound to a device, torch would split the default group's communicator, and all
    ranks of the training would have to take part. So it counts as unbound while the group is created, and
    NCCL makes a communicator of its own.
    """
    everyone: Any = dist.group.WORLD
    on_nccl = dist.get_backend(expert_parallel) == "nccl"
    nccl = parallel_state.get_nccl_options(SHORT_NAME, {SHORT_NAME: options}) if on_nccl else None
    bound, everyone.bound_device_id = everyone.bound_device_id, None
    try:
        group: dist.ProcessGroup = parallel_state.create_group(
            dist.get_process_group_ranks(expert_parallel),
            timeout=timeout,
            pg_options=nccl,
            use_local_synchronization=True,
            group_desc="FSSDP_TRANSFER_GROUP",
        )
    finally:
        everyone.bound_device_id = bound
    return group


def has_one_queue(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of a group are CUDA devices that run all kernels in the order of their issue."""
    return dist.get_backend(group) == "nccl" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def connect_ranks(group: dist.ProcessGroup) -> None:
    """Connect every two ranks of a transfer group on GPUs; collective over its ranks.

    NCCL would otherwise open each connection when the first message needs it, in the middle of the training.
    """
    if dist.get_backend(group) == "nccl":
        connect_pairs(group, torch.device("cuda", torch.cuda.current_device()))
