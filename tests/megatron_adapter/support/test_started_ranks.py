import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.entry.registration import check_started_as_rank


def test_a_process_without_a_launcher_gets_the_launch_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigurationError, match=r"no ranks: MASTER_ADDR not set, .* torchrun --standalone"):
        check_started_as_rank()
    monkeypatch.setenv("MASTER_ADDR", "node0")
    check_started_as_rank()
