"""Finds the number of tokens and the network bandwidth at which a strategy starts or stops to pay.

Shape letters: I iterations, L MoE layers, D devices, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription, FittedLink, LinkDescription
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings
from megatron_fssdp.planning.cost.link_seconds import topology_of
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.replay import OnPlan
from megatron_fssdp.simulation.simulator import simulate
from megatron_fssdp.simulation.workloads import scaled_loads
from megatron_fssdp.strategies.ep.ep_settings import EpSettings

LEAST_GAIN = 0.01
"""A strategy pays if it is faster than plain expert parallelism by more than this share."""

MOST_DOUBLINGS = 6
"""The search covers 2 to the power of this number, so from 1/64 to 64 times the job's own value."""

STEPS = 5
"""Number of halvings of the interval; the result is accurate to about a tenth."""


@dataclass(frozen=True)
class BreakEven:
    """Value of one quantity at which a strategy starts or stops to pay.

    ``pays_now`` says whether it pays at the job's own value, and ``factor`` is the multiple of it at which
    this changes; ``None`` if nowhere in the searched range.
    """

    pays_now: bool
    factor: float | None
    value: float | None


def break_evens(
    name: str,
    settings: StrategySettings,
    counts_ILDE: np.ndarray,
    cluster: ClusterDescription,
    job: MoeJob,
    *,
    past_ILDE: np.ndarray | None = None,
    on_plan: OnPlan | None = None,
) -> tuple[BreakEven, BreakEven | None]:
    """Where a strategy starts to pay, with the arguments of :func:`simulate`.

    First in tokens per rank and iteration: with fewer, it does not pay. Then in bytes/s of a node's network:
    with more, it does not pay. On one node there is no second result.
    """

    def pays(*, tokens: float = 1.0, network: float = 1.0) -> bool:
        loads = scaled_loads(counts_ILDE, tokens), _faster_network(cluster, network), job.with_tokens(tokens)
        past = None if past_ILDE is None else scaled_loads(past_ILDE, tokens)
        plain_s = simulate("ep", EpSettings(), *loads).mean_s
        outcome = simulate(name, settings, *loads, past_ILDE=past, on_plan=on_plan)
        return outcome.mean_s * (1 + LEAST_GAIN) < plain_s

    num_tokens = job.tokens_per_micro_batch * job.num_micro_batches
    by_tokens = _search(lambda factor: pays(tokens=factor), num_tokens, pays_above=True)
    if topology_of(cluster, job.num_devices).num_nodes == 1:
        return by_tokens, None
    bytes_per_s = cluster.inter_node.bandwidth_bytes_per_s
    return by_tokens, _search(lambda factor: pays(network=factor), bytes_per_s, pays_above=False)


def _faster_network(cluster: ClusterDescription, factor: float) -> ClusterDescription:
    def faster[LinkT: (LinkDescription, FittedLink)](link: LinkT) -> LinkT:
        return link.model_copy(update={"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s * factor})

    collectives = {
        name: {kind: faster(link) if kind == "inter_node" else link for kind, link in by_kind.items()}
        for name, by_kind in cluster.collectives.items()
    }
    links = {key: faster(getattr(cluster, key)) for key in ("inter_node", "inter_device")}
    return cluster.model_copy(update={**links, "collectives": collectives})


def _search(pays: Callable[[float], bool], value: float, *, pays_above: bool) -> BreakEven:
    """Bisect over the logarithm of the factor, on the side where the answer is expected to change."""
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
