"""The owner map in a checkpoint: a hint with which a run goes on where it was.

The experts of a checkpoint are known by layer and number, so it loads under any owner map
and in stock Megatron, which ignores the hint. With it, a run of the same layout starts with
the experts where the saved one had them. The hint is plain numbers in the common state, the
same on all ranks.
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
    """The owner map of this run's stage, for checkpoints.

    Attributes:
        current: Gives the stage's owners, ``None`` on a stage without MoE layers.
        adopt: Takes the owners that fit this run, before experts are loaded under them. It
            moves no contents: loading fills every slot.
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
    """The owner maps of all pipeline stages, the same on every rank.

    Every rank calls it.

    Args:
        stage: This stage's owners.

    Returns:
        What goes into the checkpoint; ``None`` where all stages have Megatron's own split.
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
    """Adopt a checkpoint's owner map, or say in one log line why not.

    Args:
        hint: What :func:`gather_hint` gave when the checkpoint was saved.
        metadata: Megatron's content metadata of the checkpoint.
        stage: This run's owners of this stage.
        adopt: Takes the map.

    Returns:
        The adopted map, if any.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    try:
        owners = fitting_owners(hint, metadata, stage, group.rank(), group.size())
    except ValueError as misfit:
        log_single_rank(logger, logging.WARNING, f"[fssdp] the checkpoint's owner map is not used: {misfit}")
        return None
    if owners is not None:
        adopt(owners)
        log_single_rank(logger, logging.INFO, "[fssdp] experts go on where the checkpoint had them")
    return owners


def fitting_owners(
    hint: Any, metadata: Mapping[str, Any], stage: StageOwners | None, rank: int, num_stages: int
) -> OwnerMap | None:
    """The owner map that a hint has for this stage.

    Args:
        hint: From the checkpoint, not trusted.
        metadata: Megatron's content metadata of the checkpoint.
        stage: This run's owners of this stage.
        rank: Of the stage in the pipeline.
        num_stages: Of this run's pipeline.

    Returns:
        The map, or ``None`` where this stage has nothing to adopt.

    Raises:
        ValueError: The hint is of another layout, another model, or damaged.
    """
    if metadata.get("distrib_optim_sharding_type") == "dp_reshardable":
        raise ValueError(
            "got optimizer state by bucket position, wanted Megatron's own split to load it into"
        )
    try:
        stages = hint["stages"]
        saved = [None if lists is None else StageOwners.from_lists(lists) for lists in stages]
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"got a hint that cannot be read ({type(error).__name__}: {error})") from None
    if len(saved) != num_stages:
        raise ValueError(f"got one of {len(saved)} pipeline stages, wanted {num_stages}")
    mine = saved[rank]
    if mine is None:
        return None
    if stage is None or mine.layer_numbers != stage.layer_numbers:
        here = "none" if stage is None else list(stage.layer_numbers)
        raise ValueError(
            f"got MoE layers {list(mine.layer_numbers)} on stage {rank}, wanted {here}: another model or "
            "pipeline"
        )
    for what, got, wanted in (
        ("expert-parallel devices", mine.owners.num_devices, stage.owners.num_devices),
        ("experts of a layer", mine.owners.num_experts, stage.owners.num_experts),
    ):
        if got != wanted:
            raise ValueError(f"got one of {got} {what}, wanted {wanted}")
    return mine.owners
