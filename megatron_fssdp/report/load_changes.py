"""What one layer's loads do between micro-batches and iterations, and what replicas could do about it.

Shape letters: I iterations, Z micro-batches, D devices, E experts, P pairs, N sources of a plan.
"""

from typing import Any

import numpy as np

from megatron_fssdp.planning.dispatch.token_dispatch import plan_dispatch
from megatron_fssdp.planning.loads import has_jumped, load_similarity, max_over_mean
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.search import plan_materialization

LOAD_CHANGES = {
    **dict.fromkeys(("max/mean: micro-batches", "99th percentile", "iterations", "run"), ".2f"),
    **{"alike: micro-batches": ".2f", "jumps: micro-batches": ".1%"},
    **{"alike: iterations": ".2f", "jumps: iterations": ".1%"},
    **dict.fromkeys(("removed: iteration before", "micro-batch before", "exact counts"), ".0%"),
}
"""Headings and formats of :func:`load_changes`; medians where several numbers are meant."""

_MOST_PAIRS = 1000


def plain_load(counts: np.ndarray) -> np.ndarray:
    """Max/mean device load under plain expert parallelism, for counts ``[…, D, E]``; 1 without load."""
    num_devices, num_experts = counts.shape[-2:]
    owned_ED = even_owners(num_experts, num_devices)[:, None] == np.arange(num_devices)
    load = counts.sum(axis=-2) @ owned_ED
    total = load.sum(axis=-1)
    return np.where(total > 0, load.max(axis=-1) * num_devices / np.maximum(total, 1e-12), 1.0)


def load_changes(counts_IZDE: np.ndarray, iterations_I: np.ndarray, slots: int, most: int) -> list[float]:
    """Figures of a layer in the order of :data:`LOAD_CHANGES`; NaN where there is nothing to compare.

    Micro-batches without tokens do not count, and only iterations in a row are compared. A figure "removed"
    is the part of max/mean - 1 of micro-batches that replicas would remove, ``slots`` on a device. They are
    planned by the counts that it names, by the search without costs, for ``most`` evenly chosen ones.
    """
    load_IZE, (num_devices, num_experts) = counts_IZDE.sum(axis=2), counts_IZDE.shape[2:]
    load_IE, is_used_IZ = load_IZE.sum(axis=1), load_IZE.any(axis=2)
    changes: list[Any] = list(np.quantile(plain_load(counts_IZDE)[is_used_IZ], (0.5, 0.99)))
    changes += [np.median(plain_load(counts_IZDE.sum(axis=1))), plain_load(counts_IZDE.sum(axis=(0, 1)))]
    after_I = np.flatnonzero(np.diff(iterations_I) == 1) + 1
    after_P2 = np.argwhere(is_used_IZ[:, 1:] & is_used_IZ[:, :-1]) + np.array([0, 1])
    of_micro_batches = [(load_IZE[i, z], load_IZE[i, z - 1]) for i, z in evenly(after_P2, _MOST_PAIRS)]
    for pairs in (of_micro_batches, [(load_IE[i], load_IE[i - 1]) for i in evenly(after_I, _MOST_PAIRS)]):
        alike = [similarity for pair in pairs if (similarity := load_similarity(*pair)) is not None]
        changes += [np.median(alike or np.nan), np.mean([has_jumped(*pair) for pair in pairs] or np.nan)]
    owner_E, topology = even_owners(num_experts, num_devices), Topology.uniform(num_devices, 1)
    excess, left_N = 0.0, np.zeros(3)
    for i, z in evenly(after_P2[np.isin(after_P2[:, 0], after_I)], most):
        now_DE = counts_IZDE[i, z]
        excess += float(plain_load(now_DE)) - 1
        for n, by_DE in enumerate((counts_IZDE[i - 1].sum(axis=0), counts_IZDE[i, z - 1], now_DE)):
            plan = plan_materialization(owner_E, by_DE, topology, overlap_degree=num_experts, slots=slots)
            left_N[n] += max_over_mean(plan_dispatch("exact", now_DE, plan, topology).device_tokens_D) - 1
    return [*map(float, changes), *(1 - left_N / excess if excess else np.full(3, np.nan))]


def evenly(things: np.ndarray, most: int) -> np.ndarray:
    """At most so many of some things, evenly chosen from the first to the last."""
    return things[np.unique(np.linspace(0, len(things) - 1, min(most, len(things))).round().astype(int))]
