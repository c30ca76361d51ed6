"""``fssdp``: fully sharded sparse data parallelism (Hecate): replicas by recent loads."""

from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.strategies.fssdp.fssdp_settings import FssdpSettings

ENTRY = shipped(FssdpSettings, "fssdp.fssdp_strategy:FssdpStrategy", "#D55E00", is_candidate=True)
