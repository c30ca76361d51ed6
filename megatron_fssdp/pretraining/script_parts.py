"""Parts of both training scripts."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args
from megatron.training.utils import get_blend_and_blend_per_split


def data_settings(args: Any) -> dict[str, Any]:
    """Return what Megatron's arguments say about any data set."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
    }


def refuse_bad_losses(losses: Mapping[str, torch.Tensor]) -> None:
    """Let Megatron's rerun machine refuse losses that are not finite, if its arguments ask for that."""
    for name, loss in losses.items() if get_args().check_for_nan_in_loss_and_grad else ():
        for is_bad, what in ((torch.isnan, "NaN"), (torch.isinf, "infinite")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"the {name} of a micro-batch is {what}",
                tolerance=0.0,
                fatal=True,
            )


def refuse_arguments(args: Any, names: Iterable[str], reason: str) -> None:
    """End the script if one of these arguments is set."""
    for name in names:
        if getattr(args, name, None):
            raise SystemExit(f"--{name.replace('_', '-')}: {reason}")
