"""Refuses a run on all ranks if one rank finds a reason, or if ranks have different settings.

Every rank reads its own command line, files and environment, and plans by them. Ranks that differ in them
would wait for each other forever.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_settings import (
    CHECK_VARIABLE,
    PROFILE_VARIABLE,
    checks_plans,
    profile_iterations,
)
from megatron_fssdp.megatron_adapter.all_ranks import of_all_ranks
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostModel
from megatron_fssdp.planning.compiled_form import source_digest
from megatron_fssdp.strategies.auto.auto_strategy import selecting

_SIZES = ("num_experts", "num_layers", "hidden_size", "seq_length")
_COMPARED = (*_SIZES, "micro_batch_size", "global_batch_size")


@contextmanager
def refused_together() -> Iterator[None]:
    """Raise on all ranks a ConfigurationError that some of them raise inside. Collective over all ranks.

    A rank that raised none gets the message of the lowest rank that did.
    """
    reason: ConfigurationError | None = None
    try:
        yield
    except ConfigurationError as error:
        reason = error
    messages = of_all_ranks(None if reason is None else str(reason))
    first = next((message for message in messages if message is not None), None)
    if first is not None:
        raise reason or ConfigurationError(first)


def check_equal_settings(model: HostModel) -> None:
    """Refuse, on all ranks, those with different settings or another request for boards. Collective."""
    check_equal(_facts(model))


def check_equal(facts: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Refuse, on all ranks of a group, ranks with different facts. Collective."""
    of_ranks = dict(zip(dist.get_process_group_ranks(group), of_all_ranks(facts, group), strict=True))
    lowest, first = next(iter(of_ranks.items()))
    # Other strategies have other settings, so a rank may lack a fact. The strategy is the first fact.
    for name in dict.fromkeys(name for known in of_ranks.values() for name in known):
        for rank, known in of_ranks.items():
            if known.get(name) != first.get(name):
                raise ConfigurationError(
                    f"{name}: got {first.get(name)} on rank {lowest} and {known.get(name)} on rank {rank}, "
                    "wanted the same on all ranks, because all of them must plan alike; start them with the "
                    "same options, files and environment"
                )


def _facts(model: HostModel) -> dict[str, Any]:
    settings = model.settings.model_dump(mode="json")
    # Only rank 0 writes records, but all ranks measure for them.
    is_recorded = settings.pop("record_dir", None) is not None
    facts: dict[str, Any] = {
        "--moe-strategy": model.name,
        **{f"--moe-strategy-set {key}": value for key, value in settings.items()},
        "whether --moe-strategy-set record_dir is given": is_recorded,
        "whether --tensorboard-dir or --wandb-project is given": model.host.has_boards,
    }
    facts |= {
        f"--{name.replace('_', '-')}": value
        for name, value in model.host.items()
        # Megatron compares none of them. With another top-k, a rank would train silently.
        if (name.startswith("moe_") or name in _COMPARED) and not callable(value)
    }
    with suppress(PackageNotFoundError):  # It may run without an installation.
        facts["version of megatron_fssdp"] = version("megatron-fssdp")
    facts["version of the planning kernels"] = source_digest()
    if model.session is not None:
        strategy = model.session.strategy
        # A candidate of another package is left out on ranks on which it cannot be built.
        if selecting(strategy):
            facts["strategies to select from"] = tuple(strategy.candidates)
        facts[PROFILE_VARIABLE], facts[CHECK_VARIABLE] = profile_iterations(), checks_plans()
        # The order in which a rank issues its messages depends on it.
        one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        facts["whether CUDA_DEVICE_MAX_CONNECTIONS is 1"] = one_queue
    return facts
