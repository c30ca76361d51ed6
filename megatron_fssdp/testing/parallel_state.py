"""Sets up Megatron's parallel state on the ranks of a test."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_fssdp.testing.ranks import DEFAULT_PRELOAD, run_ranks

MEGATRON_PRELOAD = (
    *DEFAULT_PRELOAD,
    "megatron_fssdp.megatron_adapter.cpu.cpu_runtime:install",  # which imports most of Megatron
    "megatron_fssdp.megatron_adapter.training.training_hooks",  # and most of this package
)


@contextmanager
def megatron_parallel_state(
    tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1, cp: int = 1, vpp: int | None = None, seed: int = 1234
) -> Iterator[None]:
    """Create Megatron's process groups and seed its random states on the running ranks, as Megatron does.

    ``etp`` is the experts' tensor parallelism, and ``vpp`` the number of model chunks of a pipeline rank.
    Sizes that do not divide the number of ranks are a ValueError.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    world_size = dist.get_world_size()
    if world_size % (tp * pp * cp) or world_size % (etp * ep * pp):
        raise ValueError(
            f"got {world_size} ranks, wanted a multiple of tp*pp*cp = {tp * pp * cp} and of etp*ep*pp = "
            f"{etp * ep * pp}; change the number of ranks or the sizes"
        )
    parallel_state.initialize_model_parallel(
        tp, pp, vpp, context_parallel_size=cp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )
    try:
        model_parallel_cuda_manual_seed(seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()


def run_megatron_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 900,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = MEGATRON_PRELOAD,
    **sizes: int | None,
) -> list[Any]:
    """As :func:`run_ranks`, with Megatron on the CPU in a :func:`megatron_parallel_state` of ``sizes``."""
    return run_ranks(_in_state, world_size, sizes, fn, *args, timeout_s=timeout_s, env=env, preload=preload)


def _in_state(rank: int, world_size: int, sizes: dict[str, Any], fn: Callable[..., Any], *args: Any) -> Any:
    with megatron_parallel_state(**sizes):
        return fn(rank, world_size, *args)
