"""Refuses a run whose ranks have different settings, before any of them affects a collective.

Every rank reads its own command line, its own file of ``--moe-strategy-config`` and its own environment, and
then plans alone. Ranks that differ in them would wait for each other forever.
"""

import os
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.cluster_files import load_cluster
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.layer.strategy_session import RequestedStrategy
from megatron_fssdp.megatron_adapter.training.shared_refusal import refused_together


def check_equal_settings(requested: RequestedStrategy, *, to_boards: bool) -> None:
    """Refuse ranks with different settings. Collective: all ranks of the training call it.

    Args:
        requested: Strategy of this rank's command line.
        to_boards: Whether this rank's command line requests a board.

    Raises:
        ConfigurationError: Some ranks differ in the strategy, its settings, the described cluster, this
            package's version or an environment variable, or a rank cannot read the description. It is raised
            on all ranks.
    """
    with refused_together():
        own = _facts(requested, to_boards)
    of_ranks: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    first = of_ranks[0]
    # Other strategies have other settings, so a rank may lack a fact. The strategy is the first fact.
    for name in dict.fromkeys(name for facts in of_ranks for name in facts):
        for rank, facts in enumerate(of_ranks):
            if facts.get(name) != first.get(name):
                raise ConfigurationError(
                    f"{name}: got {first.get(name)} on rank 0 and {facts.get(name)} on rank {rank}, wanted "
                    "the same on all ranks, because every rank plans alone; start all of them with the same "
                    "options, files and environment"
                )


def _facts(requested: RequestedStrategy, to_boards: bool) -> dict[str, Any]:
    settings = requested.settings.model_dump(mode="json")
    # Only rank 0 writes records, but all ranks measure for them.
    is_recorded = settings.pop("record_dir", None) is not None
    facts: dict[str, Any] = {
        "--moe-strategy": requested.name,
        "version of megatron_fssdp": _own_version(),
        **{f"--moe-strategy-set {key}": value for key, value in settings.items()},
        "whether --moe-strategy-set record_dir is given": is_recorded,
        "whether --tensorboard-dir or --wandb-project is given": to_boards,
    }
    if requested.session is not None:
        # A candidate of another package is left out on ranks on which it cannot be built.
        facts["strategies to select from"] = requested.session.strategy.candidate_names
        # The schedule that a rank selects follows from the description, not from its path.
        if (cluster := requested.session.strategy.collective_schedule.cluster) is not None:
            facts["cluster description"] = _digest(load_cluster(cluster))
        # The order in which a rank issues its messages depends on it.
        facts["whether CUDA_DEVICE_MAX_CONNECTIONS is 1"] = (
            os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        )
    return facts


def _digest(cluster: ClusterDescription) -> str:
    return f"one with the digest {sha256(cluster.model_dump_json().encode()).hexdigest()[:12]}"


def _own_version() -> str | None:
    """Return the version of the installed package; ``None`` if it runs without an installation."""
    try:
        return version("megatron-fssdp")
    except PackageNotFoundError:
        return None
