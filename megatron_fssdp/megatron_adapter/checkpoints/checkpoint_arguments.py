"""Refuses checkpoint options under which an uneven owner map would be saved wrongly without a warning."""

from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy_settings import KEEP_OWNERS


def check_checkpoint_arguments(args: Any) -> None:
    """Refuse checkpoint options that do not work with re-sharding.

    Call this before a run, and only if re-sharding is on.

    Args:
        args: Megatron's parsed arguments, with or without ``--save``.

    Raises:
        ConfigurationError: An option does not work with re-sharding.
    """

    def value(name: str) -> Any:
        return getattr(args, name, None)

    saves = value("save") is not None or value("non_persistent_save_interval") is not None
    if saves and value("ckpt_format") != "torch_dist":
        raise _refusal(
            f"--ckpt-format: got {value('ckpt_format')}, wanted torch_dist, the only format that stores an "
            "expert under its layer and number; use --ckpt-format torch_dist"
        )
    if value("ckpt_convert_format") not in (None, "torch_dist"):
        raise _refusal(
            f"--ckpt-convert-format: got {value('ckpt_convert_format')}, wanted torch_dist or no conversion; "
            "convert without a placement strategy (--moe-strategy none)"
        )
    if saves and value("non_persistent_ckpt_type") == "local":
        raise _refusal(
            "--non-persistent-ckpt-type: got local, which stores experts by rank and slot, wanted global; "
            "use --non-persistent-ckpt-type global"
        )
    # The layer-wise optimizer contains a distributed optimizer for some parameters.
    distributed = value("use_distributed_optimizer") or value("use_layer_wise_distributed_optimizer")
    if (
        saves
        and distributed
        and not value("no_save_optim")
        and not value("dist_ckpt_optim_fully_reshardable")
    ):
        raise _refusal(
            "distributed optimizer: got its checkpoint format dp_reshardable, which stores states by their "
            "position in a bucket and would load them into the wrong experts, wanted fully_reshardable; add "
            "--dist-ckpt-optim-fully-reshardable"
        )
    if saves and value("ckpt_assume_constant_structure"):
        raise _refusal(
            "--ckpt-assume-constant-structure: got one plan for all saves, wanted a new plan for each save, "
            "because experts move between saves; remove the flag"
        )


def _refusal(message: str) -> ConfigurationError:
    return ConfigurationError(f"{message}, or {KEEP_OWNERS}")
