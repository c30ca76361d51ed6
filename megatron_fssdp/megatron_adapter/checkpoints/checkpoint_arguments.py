"""Checkpoint options under which an uneven owner map would be saved wrongly: they are refused or replaced."""

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_settings import KEEP_OWNERS
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
"""Settings of checkpoints that cannot hold moved experts, with values that mean the same training."""


def fit_checkpoint_arguments(who: str, args: Any) -> None:
    """Refuse parsed checkpoint options that do not work with re-sharding, and replace some of them in place.

    Call this before a run, and only if re-sharding is on. Rank 0 logs one line for each replacement, which
    starts with ``who``, the strategy.

    Raises:
        ConfigurationError: An option does not work with re-sharding and cannot be replaced.
    """
    value = value_of(args)
    message = None
    if _saves(value) and value("ckpt_format") != "torch_dist":
        message = (
            f"--ckpt-format: got {value('ckpt_format')}, wanted torch_dist, the only format that stores an "
            "expert under its layer and number; use --ckpt-format torch_dist"
        )
    elif value("ckpt_convert_format") not in (None, "torch_dist"):
        message = (
            f"--ckpt-convert-format: got {value('ckpt_convert_format')}, wanted torch_dist or no conversion; "
            "convert without a placement strategy (--moe-strategy none)"
        )
    elif _saves(value) and value("non_persistent_ckpt_type") == "local":
        message = (
            "--non-persistent-ckpt-type: got local, which stores experts by rank and slot, wanted global; "
            "use --non-persistent-ckpt-type global"
        )
    for name in ("save_params_interval", "save_wgrads_interval"):
        if message is None and value(name) is not None:
            message = (
                f"--{name.replace('_', '-')}: got {value(name)}, which saves tensors by the names of "
                "Parameters, but a moved expert is in another expert's Parameters; remove the option"
            )
    if message is not None:
        raise ConfigurationError(f"{message}, or {KEEP_OWNERS}")
    for what, is_asked, name, new, meaning in CHECKPOINT_REPLACEMENTS:
        if is_asked(value):
            setattr(args, name, new)
            if os.environ.get("RANK", "0") == "0":
                logger.warning(f"[fssdp] {who}: {what}: {meaning}")
