"""Where a strategy stops paying: how many tokens, how fast a network.

Shape letters: I iterations, L MoE layers, D devices, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription, FittedLink, LinkDescription
from megatron_fssdp.config.strategy_settings import EpSettings, StrategySettings
from megatron_fssdp.simulation.job_loads import scaled_loads
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.simulator import simulate

LEAST_GAIN = 0.01
"""A strategy pays if it is faster than plain expert parallelism by more than this part."""

MOST_DOUBLINGS = 6
"""From a 64th to 64 times what the job has is searched."""

STEPS = 5
"""Halvings of the interval: the answer is right to 2 ** (6 / 32) / 2, a tenth."""


@dataclass(frozen=True)
class BreakEven:
    """Where a strategy stops paying along one quantity.

    Attributes:
        pays_now: Whether it pays at the job's own value.
        factor: At how many times that value this changes; ``None`` if nowhere in the range searched.
        value: The quantity there.
    """

    pays_now: bool
    factor: float | None
    value: float | None


def break_even_tokens(
    name: str,
    settings: StrategySettings,
    counts_ILDE: np.ndarray,
    cluster: ClusterDescription,
    job: MoeJob,
    past_ILDE: np.ndarray | None,
) -> BreakEven:
    """Tokens of a rank in an iteration below which a strategy does not pay.

    Args:
        name: The strategy.
        settings: Its settings.
        counts_ILDE: Some iterations.
        cluster: Where.
        job: What.
        past_ILDE: Those before them.
    """

    def pays(factor: float) -> bool:
        past = None if past_ILDE is None else scaled_loads(past_ILDE, factor)
        return _pays(
            name, settings, scaled_loads(counts_ILDE, factor), cluster, job.with_tokens(factor), past
        )

    return _search(pays, job.tokens_per_micro_batch * job.num_micro_batches, pays_above=True)


def break_even_bandwidth(
    name: str,
    settings: StrategySettings,
    counts_ILDE: np.ndarray,
    cluster: ClusterDescription,
    job: MoeJob,
    past_ILDE: np.ndarray | None,
) -> BreakEven:
    """Bandwidth of a node above which a strategy does not pay, bytes/s; arguments as for tokens."""

    def pays(factor: float) -> bool:
        return _pays(name, settings, counts_ILDE, faster_network(cluster, factor), job, past_ILDE)

    return _search(pays, cluster.inter_node.bandwidth_bytes_per_s, pays_above=False)


def faster_network(cluster: ClusterDescription, factor: float) -> ClusterDescription:
    """The cluster with ``factor`` times the bandwidth between nodes."""

    def faster[LinkT: (LinkDescription, FittedLink)](link: LinkT) -> LinkT:
        return link.model_copy(update={"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s * factor})

    collectives = {
        name: {kind: faster(link) if kind == "inter_node" else link for kind, link in by_kind.items()}
        for name, by_kind in cluster.collectives.items()
    }
    return cluster.model_copy(update={"inter_node": faster(cluster.inter_node), "collectives": collectives})


def _pays(
    name: str,
    settings: StrategySettings,
    counts_ILDE: np.ndarray,
    cluster: ClusterDescription,
    job: MoeJob,
    past_ILDE: np.ndarray | None,
) -> bool:
    plain_s = simulate("ep", EpSettings(), counts_ILDE, cluster, job).mean_s
    seconds = simulate(name, settings, counts_ILDE, cluster, job, past_ILDE=past_ILDE).mean_s
    return seconds * (1 + LEAST_GAIN) < plain_s


def _search(pays: Callable[[float], bool], value: float, *, pays_above: bool) -> BreakEven:
    """Bisection over the logarithm of the factor, on the side where the answer should change."""
    pays_now = pays(1.0)
    here, there = 0.0, float(MOST_DOUBLINGS if pays_now != pays_above else -MOST_DOUBLINGS)
    if pays(2.0**there) == pays_now:
        return BreakEven(pays_now, None, None)
    for _ in range(STEPS):
        middle = (here + there) / 2
        if pays(2.0**middle) == pays_now:
            here = middle
        else:
            there = middle
    factor = 2.0 ** ((here + there) / 2)
    return BreakEven(pays_now, factor, value * factor)
