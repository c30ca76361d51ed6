"""Checkpoint options under which an uneven owner map would be saved wrongly without a word."""

from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy_settings import KEEP_OWNERS


def check_checkpoint_arguments(args: Any) -> None:
    """Refuse checkpoint options that do not go together with re-sharding.

    Call only when re-sharding is on; before a run, with or without ``--save``.

    Args:
        args: Megatron's parsed arguments.

    Raises:
        ConfigurationError: With the option and the next step.
    """

    def value(name: str) -> Any:
        return getattr(args, name, None)

    saves = value("save") is not None or value("non_persistent_save_interval") is not None
    if saves and value("ckpt_format") != "torch_dist":
        raise _refusal(
            f"--ckpt-format: got {value('ckpt_format')}, wanted torch_dist, the one format that knows an "
            "expert by its layer and number: use --ckpt-format torch_dist"
        )
    if value("ckpt_convert_format") not in (None, "torch_dist"):
        raise _refusal(
            f"--ckpt-convert-format: got {value('ckpt_convert_format')}, wanted torch_dist or none: "
            "convert without a placement strategy, --moe-strategy none"
        )
    if saves and value("non_persistent_ckpt_type") == "local":
        raise _refusal(
            "--non-persistent-ckpt-type: got local, which stores a rank's experts by their place, wanted "
            "global: use --non-persistent-ckpt-type global"
        )
    # The layer-wise optimizer keeps a distributed one for some parameters.
    distributed = value("use_distributed_optimizer") or value("use_layer_wise_distributed_optimizer")
    if (
        saves
        and distributed
        and not value("no_save_optim")
        and not value("dist_ckpt_optim_fully_reshardable")
    ):
        raise _refusal(
            "the distributed optimizer: got its checkpoint format dp_reshardable, which stores state by "
            "bucket position and would be loaded into the wrong experts, wanted fully_reshardable: add "
            "--dist-ckpt-optim-fully-reshardable"
        )
    if saves and value("ckpt_assume_constant_structure"):
        raise _refusal(
            "--ckpt-assume-constant-structure: got a plan that is kept from save to save, wanted a new one, "
            "experts move in between: drop the flag"
        )


def _refusal(message: str) -> ConfigurationError:
    return ConfigurationError(f"{message}, or {KEEP_OWNERS}")
