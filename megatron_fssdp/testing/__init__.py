"""Runs test code on gloo ranks that start in milliseconds, optionally with Megatron's parallel state."""

from megatron_fssdp.testing.parallel_state import MEGATRON_PRELOAD as MEGATRON_PRELOAD
from megatron_fssdp.testing.parallel_state import megatron_parallel_state as megatron_parallel_state
from megatron_fssdp.testing.parallel_state import run_megatron_ranks as run_megatron_ranks
from megatron_fssdp.testing.ranks import DEFAULT_PRELOAD as DEFAULT_PRELOAD
from megatron_fssdp.testing.ranks import RankError as RankError
from megatron_fssdp.testing.ranks import run_ranks as run_ranks
