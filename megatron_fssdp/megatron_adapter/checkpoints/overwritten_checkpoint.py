"""A checkpoint that is being written over is none until it is complete again.

Megatron writes the two files that make a folder a ``torch_dist`` checkpoint when all ranks
have written their data, and names the iteration in ``latest_checkpointed_iteration.txt``
after that. A save that is killed in a new folder therefore leaves the former checkpoint the
latest. A run that goes on from an earlier iteration, however, saves into folders that hold
complete checkpoints; killed there, it would leave their old marks over a mixture of old and
new data. Whether that loads, or fails on the way, would depend on which bytes have changed.
"""

from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME

from megatron_fssdp.collectives.failure_place import naming_failures

_MARKS = (".metadata", CONFIG_FNAME)  # without the first, a load that saw the second fails


def wrap_save(dist_checkpointing: Any) -> None:
    """Wrap Megatron's ``save`` so that it takes a folder's marks away before it writes there.

    Args:
        dist_checkpointing: The package ``megatron.core.dist_checkpointing``, in which
            Megatron's training looks the function up at call time.
    """
    save = dist_checkpointing.save

    @wraps(save)
    def save_with_new_marks(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        # All ranks plan with rank 0 before any of them writes.
        if dist.get_rank() == 0:
            for name in _MARKS:
                (Path(str(checkpoint_dir)) / name).unlink(missing_ok=True)
        with naming_failures(f"saving {checkpoint_dir}"):
            return save(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    dist_checkpointing.save = save_with_new_marks
