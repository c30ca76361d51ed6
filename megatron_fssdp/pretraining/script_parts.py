"""Parts of both training scripts."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args
from megatron.training.utils import get_blend_and_blend_per_split


def built_datasets(
    kind: type, config_kind: type, num_samples: list[int], *, is_needed: bool = True, **settings: Any
) -> Any:
    """Build training, validation and test data, of these numbers of samples, on the ranks that read data.

    The config of the data has the fields that Megatron's arguments name, and ``settings``.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    named = {field.name for field in fields(config_kind)} & vars(args).keys()
    config = config_kind(
        **{name: getattr(args, name) for name in named} | settings,
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
    )
    reads_data = is_needed and parallel_state.get_tensor_model_parallel_rank() == 0
    return tuple(BlendedMegatronDatasetBuilder(kind, num_samples, lambda: reads_data, config).build())


def refuse_bad_losses(losses: Mapping[str, torch.Tensor]) -> None:
    """Let Megatron's rerun machine refuse losses that are not finite, if its arguments ask for that."""
    for name, loss in losses.items() if get_args().check_for_nan_in_loss_and_grad else ():
        for is_bad, kind in ((torch.isnan, "NaN"), (torch.isinf, "infinite")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"the {name} of a micro-batch is {kind}",
                tolerance=0.0,
                fatal=True,
            )


def refuse_arguments(args: Any, supported: Mapping[str, Collection[object]], reason: str) -> None:
    """End the script if one of these arguments has another value than the supported ones."""
    for name, values in supported.items():
        if (got := getattr(args, name, None)) not in (None, *values):
            wanted = " or ".join(map(str, values))
            raise SystemExit(f"--{name.replace('_', '-')}: got {got}, wanted {wanted}; {reason}")
