"""A model that a host trains under a strategy: what the files around its iterations need to know of it."""

from dataclasses import dataclass, field
from typing import Any

from megatron_fssdp.config.strategy.strategy_settings import StrategySettings
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostSettings
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession


@dataclass(eq=False)
class HostModel:
    """The strategy and its settings, those of the host, and the session, which is ``None`` under ``none``."""

    name: str
    settings: StrategySettings
    host: HostSettings
    session: StrategySession | None
    chunks: list[Any] = field(default_factory=list, init=False)  # of this rank, as DDP wraps them
