"""Sets up Megatron's parallel state on the ranks of a test."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from megatron_fssdp.testing.ranks import DEFAULT_PRELOAD, run_ranks

MEGATRON_PRELOAD = (
    *DEFAULT_PRELOAD,
    "megatron_fssdp.megatron_adapter.cpu.cpu_runtime:install",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.bert.bert_model",
    "megatron.core.models.mimo",
    "megatron.training.training",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.tokenizers.text",
    "megatron_fssdp.testing.parallel_state:keep_option_texts",
    "megatron_fssdp.megatron_adapter.entry.launcher",
    "megatron_fssdp.megatron_adapter.entry.registration",
    "megatron_fssdp.megatron_adapter.training.training_hooks",
    "megatron_fssdp.strategies.fssdp",
    "megatron_fssdp.strategies.auto",
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
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
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
    timeout_s: float = 300,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = MEGATRON_PRELOAD,
    **sizes: int | None,
) -> list[Any]:
    """Run ranks (:func:`run_ranks`) inside :func:`megatron_parallel_state`, whose arguments ``sizes`` are.

    Megatron and its CPU runtime are preloaded.
    """
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **(env or {})}
    call = (_call_in_state, world_size, sizes, fn, args)
    return run_ranks(*call, timeout_s=timeout_s, env=env, preload=preload)


def _call_in_state(
    rank: int, world_size: int, sizes: dict[str, Any], fn: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    with megatron_parallel_state(**sizes):
        return fn(rank, world_size, *args)


def keep_option_texts() -> None:
    """Let Megatron read its options' help texts once, and not twice on each rank of a training."""
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    read = cache(partial(ArgumentGroupFactory._get_field_docstrings, ArgumentGroupFactory))
    ArgumentGroupFactory._get_field_docstrings = staticmethod(read)
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
