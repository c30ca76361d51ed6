"""Run code on gloo ranks in milliseconds, and Megatron's parallel state on them."""

from megatron_fssdp.testing.parallel_state import (
    MEGATRON_PRELOAD,
    megatron_parallel_state,
    run_megatron_ranks,
)
from megatron_fssdp.testing.ranks import DEFAULT_PRELOAD, RankError, RankTimeoutError, run_ranks

__all__ = [
    "DEFAULT_PRELOAD",
    "MEGATRON_PRELOAD",
    "RankError",
    "RankTimeoutError",
    "megatron_parallel_state",
    "run_megatron_ranks",
    "run_ranks",
]
