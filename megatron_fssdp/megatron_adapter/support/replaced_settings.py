"""Settings of Megatron whose place a placement strategy takes, so that a training need not be refused.

They name forms of a checkpoint that cannot hold moved experts. The strategy sets them to values that mean the
same training, and logs one line for each.
"""

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from megatron_fssdp.megatron_adapter.support.supported_features import Value, value_of

logger = logging.getLogger(__name__)


class Replacement(NamedTuple):
    """A replaced setting: what was given, whether it is asked for, name, new value, the effect."""

    what: str
    is_asked: Callable[[Value], object]
    name: str
    new: Any
    meaning: str


def _saves(value: Value) -> bool:
    return value("save") is not None or value("non_persistent_save_interval") is not None


CHECKPOINT_REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement(
        "the distributed optimizer's checkpoint format dp_reshardable",
        lambda value: (
            _saves(value)
            # The layer-wise optimizer contains a distributed optimizer for some parameters.
            and (value("use_distributed_optimizer") or value("use_layer_wise_distributed_optimizer"))
            and not value("no_save_optim")
            and not value("dist_ckpt_optim_fully_reshardable")
        ),
        "dist_ckpt_optim_fully_reshardable",
        True,
        "checkpoints are saved as with --dist-ckpt-optim-fully-reshardable, because the other format stores "
        "states by their position in a bucket, and re-sharding changes positions",
    ),
    Replacement(
        "--ckpt-assume-constant-structure",
        lambda value: _saves(value) and value("ckpt_assume_constant_structure"),
        "ckpt_assume_constant_structure",
        False,
        "every save gets a plan of its own, because experts move between saves",
    ),
)
"""Settings of checkpoints that cannot hold experts which re-sharding has moved."""


def replace_settings(who: str, replacements: Iterable[Replacement], settings: Any) -> None:
    """Replace settings of Megatron's parsed arguments in place, and log each replacement on rank 0.

    ``who`` starts the messages: the strategy that takes the place of the settings.
    """
    for what, is_asked, name, new, meaning in replacements:
        if is_asked(value_of(settings)):
            setattr(settings, name, new)
            if os.environ.get("RANK", "0") == "0":
                logger.warning(f"[fssdp] {who}: {what}: {meaning}")
