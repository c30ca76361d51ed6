"""The owner map in a checkpoint: a hint with which a resumed run keeps its owners.

A checkpoint identifies experts by layer and number. It can be loaded under any owner map and in stock
Megatron, which ignores the hint. With the hint, a run of the same layout starts with the owners of the run
that saved the checkpoint. The hint consists of plain numbers in the common state, equal on all ranks.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import log_single_rank

from megatron_fssdp.megatron_adapter.experts.stage_owners import StageOwners
from megatron_fssdp.planning.placement.owner_map import OwnerMap

logger = logging.getLogger(__name__)

HINT_KEY = "megatron_fssdp_owners"

CurrentOwners = Callable[[], StageOwners | None]
Adopt = Callable[[OwnerMap], None]


@dataclass(frozen=True)
class OwnerHint:
    """The owner map of this pipeline stage as a :class:`CheckpointHint`.

    Attributes:
        current: Function that returns the owners of the stage; ``None`` on a stage without MoE layers.
        adopt: Function that makes a loaded owner map the current one, before experts are loaded. It moves
            no contents, because loading fills every slot.
        key: Name of the hint in the checkpoint's common state.
    """

    current: CurrentOwners
    adopt: Adopt
    key: str = HINT_KEY

    def gather(self) -> dict[str, Any] | None:
        """See :func:`gather_hint`."""
        return gather_hint(self.current())

    def take(self, hint: Any, metadata: Mapping[str, Any]) -> None:
        """See :func:`take_hint`."""
        take_hint(hint, metadata, self.current(), self.adopt)


def gather_hint(stage: StageOwners | None) -> dict[str, Any] | None:
    """Gather the owner maps of all pipeline stages. Collective: every rank calls it.

    Args:
        stage: Owners of this pipeline stage.

    Returns:
        The value to save, equal on all ranks; ``None`` if all stages have Megatron's even distribution.
    """
    own = None if stage is None or stage.owners.is_even else stage.as_lists()
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[dict[str, Any] | None] = [None] * group.size()
    dist.all_gather_object(stages, own, group=group)
    if all(lists is None for lists in stages):
        return None
    return {"stages": stages}


def take_hint(
    hint: Any, metadata: Mapping[str, Any], stage: StageOwners | None, adopt: Adopt
) -> OwnerMap | None:
    """Adopt a checkpoint's owner map, or log one line why it is not used.

    Args:
        hint: Result of :func:`gather_hint` in the run that saved the checkpoint.
        metadata: Megatron's content metadata of the checkpoint.
        stage: Owners of this pipeline stage in this run.
        adopt: Function that makes an owner map the current one.

    Returns:
        The adopted owner map; ``None`` if none was adopted.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    try:
        owners = fitting_owners(hint, metadata, stage, group.rank(), group.size())
    except ValueError as misfit:
        log_single_rank(logger, logging.WARNING, f"[fssdp] the checkpoint's owner map is not used: {misfit}")
        return None
    if owners is not None:
        adopt(owners)
        log_single_rank(logger, logging.INFO, "[fssdp] experts keep the owners of the checkpoint")
    return owners


def fitting_owners(
    hint: Any, metadata: Mapping[str, Any], stage: StageOwners | None, rank: int, num_stages: int
) -> OwnerMap | None:
    """Return the owner map that a hint contains for this pipeline stage.

    Args:
        hint: Value in the checkpoint. It may be damaged or come from another layout.
        metadata: Megatron's content metadata of the checkpoint.
        stage: Owners of this pipeline stage in this run.
        rank: Number of this stage in the pipeline.
        num_stages: Number of stages of this run's pipeline.

    Returns:
        The owner map; ``None`` if the hint has none for this stage.

    Raises:
        ValueError: The hint comes from another layout or another model, or it is damaged.
    """
    if metadata.get("distrib_optim_sharding_type") == "dp_reshardable":
        raise ValueError(
            "got optimizer states stored by bucket position, which can be loaded only under Megatron's even "
            "owners"
        )
    try:
        stages = hint["stages"]
        saved = [None if lists is None else StageOwners.from_lists(lists) for lists in stages]
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"got a hint that cannot be read ({type(error).__name__}: {error})") from None
    if len(saved) != num_stages:
        raise ValueError(f"got an owner map of {len(saved)} pipeline stages, wanted {num_stages}")
    mine = saved[rank]
    if mine is None:
        return None
    if stage is None or mine.layer_numbers != stage.layer_numbers:
        here = "none" if stage is None else list(stage.layer_numbers)
        raise ValueError(
            f"got MoE layers {list(mine.layer_numbers)} on stage {rank}, wanted {here}; the checkpoint is "
            "from another model or another pipeline layout"
        )
    for what, got, wanted in (
        ("expert-parallel devices", mine.owners.num_devices, stage.owners.num_devices),
        ("experts of a layer", mine.owners.num_experts, stage.owners.num_experts),
    ):
        if got != wanted:
            raise ValueError(f"got an owner map of {got} {what}, wanted {wanted}")
    return mine.owners
