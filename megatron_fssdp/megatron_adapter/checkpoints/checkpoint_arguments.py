"""Refuses checkpoint options under which an uneven owner map would be saved wrongly without a warning."""

from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_settings import KEEP_OWNERS


def check_checkpoint_arguments(args: Any) -> None:
    """Refuse checkpoint options that do not work with re-sharding and cannot be replaced.

    Call this before a run, and only if re-sharding is on. ``CHECKPOINT_REPLACEMENTS`` has the options that
    are replaced.

    Args:
        args: Megatron's parsed arguments, with or without ``--save``.

    Raises:
        ConfigurationError: An option does not work with re-sharding.
    """

    def value(name: str) -> Any:
        return getattr(args, name, None)

    message = None
    saves = value("save") is not None or value("non_persistent_save_interval") is not None
    if saves and value("ckpt_format") != "torch_dist":
        message = (
            f"--ckpt-format: got {value('ckpt_format')}, wanted torch_dist, the only format that stores an "
            "expert under its layer and number; use --ckpt-format torch_dist"
        )
    elif value("ckpt_convert_format") not in (None, "torch_dist"):
        message = (
            f"--ckpt-convert-format: got {value('ckpt_convert_format')}, wanted torch_dist or no conversion; "
            "convert without a placement strategy (--moe-strategy none)"
        )
    elif saves and value("non_persistent_ckpt_type") == "local":
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
