"""Checkpoint options that would lose experts without a warning are refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_arguments import fit_checkpoint_arguments

SAFE = {
    "save": "folder",
    "ckpt_format": "torch_dist",
    "ckpt_convert_format": None,
    "non_persistent_ckpt_type": None,
    "non_persistent_save_interval": None,
    "use_distributed_optimizer": False,
    "dist_ckpt_optim_fully_reshardable": False,
    "no_save_optim": None,
    "ckpt_assume_constant_structure": False,
}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ckpt_format": "torch"}, "use --ckpt-format torch_dist"),
        ({"ckpt_format": "torch_dcp"}, "use --ckpt-format torch_dist"),
        ({"ckpt_convert_format": "torch", "save": None}, "--moe-strategy none"),
        ({"non_persistent_ckpt_type": "local"}, "--non-persistent-ckpt-type global"),
        ({"save_params_interval": 5}, "--save-params-interval: got 5"),
        ({"save_wgrads_interval": 5}, "--save-wgrads-interval: got 5"),
    ],
)
def test_unsafe_checkpoint_arguments_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match) as refusal:
        fit_checkpoint_arguments("fssdp", SimpleNamespace(**{**SAFE, **options}))
    assert "reshard_interval=0" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True},
        {"use_distributed_optimizer": True, "no_save_optim": True},
        {"save": None, "ckpt_format": "torch", "use_distributed_optimizer": True},
        {"non_persistent_ckpt_type": "global", "non_persistent_save_interval": 5},
    ],
)
def test_safe_checkpoint_arguments_are_accepted(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    fit_checkpoint_arguments("fssdp", SimpleNamespace(**{**SAFE, **options}))
    assert not caplog.messages


@pytest.mark.parametrize(
    "options",
    [
        {"use_distributed_optimizer": True},
        {"use_layer_wise_distributed_optimizer": True},
        {"use_distributed_optimizer": True, "save": None, "non_persistent_save_interval": 5},
        {"ckpt_assume_constant_structure": True},
    ],
)
def test_formats_that_cannot_hold_moved_experts_are_replaced(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    args = SimpleNamespace(**{**SAFE, **options})
    fit_checkpoint_arguments("--moe-strategy fssdp", args)
    assert args.dist_ckpt_optim_fully_reshardable == ("ckpt_assume_constant_structure" not in options)
    assert not args.ckpt_assume_constant_structure
    assert len(caplog.messages) == 1
    fit_checkpoint_arguments("--moe-strategy fssdp", args)
    assert len(caplog.messages) == 1
