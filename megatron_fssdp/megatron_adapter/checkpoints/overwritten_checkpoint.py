"""Makes a checkpoint invalid while it is overwritten, until it is complete again.

Two files, which Megatron writes last, mark a folder as a ``torch_dist`` checkpoint. A run that resumes from
an earlier iteration saves into folders that hold complete checkpoints. If such a save were killed, the old
files would mark a mixture of old and new data as a checkpoint. They are therefore deleted before the save.
"""

from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME

from megatron_fssdp.collectives.failure_place import naming_failures

# The order matters. If the save is killed between the two deletions, a load finds the second file, misses
# the first one and fails.
_MARKS = (".metadata", CONFIG_FNAME)


def wrap_save(dist_checkpointing: Any) -> None:
    """Wrap ``save`` of ``megatron.core.dist_checkpointing``, so that it first deletes the two files."""
    save = dist_checkpointing.save

    @wraps(save)
    def save_with_new_marks(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        # No rank writes data before the deletion, because all ranks plan the save with rank 0 first.
        if dist.get_rank() == 0:
            for name in _MARKS:
                (Path(str(checkpoint_dir)) / name).unlink(missing_ok=True)
        with naming_failures(f"saving {checkpoint_dir}"):
            return save(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    dist_checkpointing.save = save_with_new_marks
