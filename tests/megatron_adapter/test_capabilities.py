"""What the plugin hangs on is there; what is not is named."""

import pytest

from megatron_fssdp.config.errors import ConfigurationError


def test_the_installed_megatron_has_all_seams() -> None:
    from megatron_fssdp.megatron_adapter.capabilities import check_training

    check_training()


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("megatron.core.transformer.no_such_module", "Layer"),
        ("megatron.core.transformer.transformer_layer", "TransformerLayer.no_such_method"),
        # Named by its instances only, like the attributes that are there.
        ("megatron.core.distributed", "DistributedDataParallel.no_such_attribute"),
        ("megatron.training.checkpointing", "dist_checkpointing.no_such_function"),
    ],
)
def test_a_missing_seam_is_named(module: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_fssdp.megatron_adapter import capabilities

    seam = capabilities.Seam(module, path, "does something", "every run")
    monkeypatch.setattr(capabilities, "_TRAINING_SEAMS", (seam,))
    with pytest.raises(ConfigurationError, match=path) as refusal:
        capabilities.check_training()
    assert capabilities.TESTED_RANGE in str(refusal.value)
