"""Runs test code on gloo ranks that start in milliseconds, optionally with Megatron's parallel state.

``tests/testing/test_example.py`` in the project's repository shows a test that uses it.
"""

from megatron_fssdp.testing.parallel_state import (
    MEGATRON_PRELOAD,
    megatron_parallel_state,
    run_megatron_ranks,
)
from megatron_fssdp.testing.ranks import DEFAULT_PRELOAD, RankError, run_ranks

__all__ = [
    "DEFAULT_PRELOAD",
    "MEGATRON_PRELOAD",
    "RankError",
    "megatron_parallel_state",
    "run_megatron_ranks",
    "run_ranks",
]
