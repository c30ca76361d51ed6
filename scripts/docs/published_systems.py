"""Compares the simulated systems of others with what their publications state, for docs/simulator.md.

usage: python scripts/docs/published_systems.py --result FILE.json       (a result of benchmarks/results)

Loads are drawn as in UltraEP's test (tests/utils.py there): the popularity of the devices' experts follows
Zipf's law, that of the experts of one device the fourth power of it, and each token has different experts.
The exponent is the one with the published max/mean load. Links start in 5 µs, as on h200.

Shape letters: D devices, E experts, T tokens.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

# Another checkout may be installed, but the numbers must be those of this one.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.result_file import write_result
from megatron_fssdp.config.cluster_description import load_cluster
from megatron_fssdp.planning.cost.layer_profile import measured_messages
from megatron_fssdp.planning.cost.layer_seconds import transfer_times
from megatron_fssdp.planning.cost.link_seconds import cluster_cost, cluster_links, transfer_traffic
from megatron_fssdp.planning.loads import max_over_mean
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.systems.eplb import eplb_slots
from megatron_fssdp.systems.exact_counts import equal_rows, quotas_in_nodes

DEVICES, TOP_K, TOKENS, SLOTS = 64, 8, 8192, 2
"""UltraEP's README: EP64, 8 of the experts for each of a rank's tokens, redundant experts of a rank."""
EXPERT_BYTES = 2 * 3 * 4096 * 1536
"""Defaults of its tests/test_e2e.py, in bf16."""
LINK_BYTES_PER_S = 710e9
"""Its README: 706 to 715 GB/s on the critical path."""
WITHIN = 0.15
"""As for the figures of the papers."""

EPLB_README = (
    "90 132 40 61 104 165 39 4 73 56 183 86: 5 6 5 7 8 4 3 4 10 9 10 2 0 1 11 1",
    "20 107 104 64 19 197 187 157 172 86 16 27: 7 10 6 8 6 11 8 9 2 4 5 1 5 0 3 1",
)
"""Loads of a layer's experts, and the expert in each physical slot."""


def drawn_loads(exponent: float, num_experts: int, num_tokens: int) -> np.ndarray:
    """Pairs of each expert, int64 ``[E]``, if each device has so many tokens."""
    device_D, local = np.arange(1, DEVICES + 1), np.arange(1, num_experts // DEVICES + 1)
    popularity_E = np.log((device_D[:, None] ** -exponent * local**-4.0).ravel())
    rng, load_E = np.random.default_rng(33), np.zeros(num_experts, np.int64)
    for _ in range(DEVICES):
        # The highest of scores with Gumbel noise are a draw without replacement.
        score_TE = popularity_E + rng.gumbel(size=(num_tokens, num_experts))
        chosen = np.argpartition(score_TE, -TOP_K, axis=1)[:, -TOP_K:]
        load_E += np.bincount(chosen.ravel(), minlength=num_experts)
    return load_E


@cache
def loads_of(ratio: float, num_experts: int) -> np.ndarray:
    """Pairs of each expert, int64 ``[E]``, whose max/mean device load is about ``ratio``."""
    low, high = 0.0, 4.0
    for _ in range(10):
        middle = (low + high) / 2
        load_D = drawn_loads(middle, num_experts, TOKENS // 32).reshape(DEVICES, -1).sum(axis=1)
        low, high = (middle, high) if max_over_mean(load_D) < ratio else (low, middle)
    return drawn_loads(high, num_experts, TOKENS)


def ultraep(before: float, num_experts: int = 256) -> tuple[str, str, str, str]:
    """Max/mean load, all replicas, most of one expert, and milliseconds of their weights, for one load."""
    load_E, owner_E = loads_of(before, num_experts), even_owners(num_experts, DEVICES)
    topology = Topology.uniform(DEVICES, 1)
    tokens_ED = quotas_in_nodes(owner_E, load_E, topology, slots=SLOTS)
    placement = ExpertPlacement(owner_E, (tokens_ED > 0) | (owner_E[:, None] == np.arange(DEVICES)))
    cluster = load_cluster("h200")
    link = cluster.intra_node.model_copy(update={"bandwidth_bytes_per_s": LINK_BYTES_PER_S})
    cluster = cluster.model_copy(update={"intra_node": link, "devices_per_node": DEVICES, "num_nodes": 1})
    traffic = transfer_traffic(two_level_transfer(placement, topology), topology)
    messages = measured_messages(cluster_cost(cluster), on_cuda=True)
    sent_s = transfer_times(cluster_links(cluster).transfer, traffic, EXPERT_BYTES, messages).seconds
    most = placement.present_ED.sum(axis=1).max() - 1
    after = max_over_mean(tokens_ED.sum(axis=0))
    return f"{after:.2f}", str(placement.num_replicas), str(most), f"{1e3 * sent_s:.2f}"


def eplb(layer: str) -> str:
    """Number of slots that have the expert of EPLB's example: 4 groups on 2 nodes of 4 devices."""
    load_E, slot_P = (np.array(numbers.split(), np.int64) for numbers in layer.split(":"))
    return str((eplb_slots(load_E, 8, slots=2, num_nodes=2, num_groups=4).ravel() == slot_P).sum())


def rows() -> Iterator[tuple[str, str, str, str]]:
    """System, figure, published and here, with several numbers in one cell."""
    yield (
        "EPLB",
        "slots as in the example of its README, 2 layers",
        "16, 16",
        ", ".join(map(eplb, EPLB_README)),
    )
    of_loads = [ultraep(before) for before in (1.51, 2.01, 3.03)]
    stated = {
        "max/mean load": "1.01, 1.01, 1.01",
        "replicas": "38, 46, 51",
        "most replicas of one expert": "4, 5, 6",
        "sending weights, ms": "0.194, 0.195, 0.188",
    }
    for (quantity, published), here in zip(stated.items(), zip(*of_loads, strict=True), strict=True):
        yield "UltraEP", f"{quantity}, from max/mean 1.51, 2.01, 3.03", published, ", ".join(here)
    after = ", ".join(ultraep(before, 128)[0] for before in (1.30, 4.01))
    yield "UltraEP", "max/mean load, from 1.30 and 4.01 (its models)", "1.01–1.04, 1.01–1.04", after
    rows_D = equal_rows(even_owners(256, DEVICES), loads_of(3.03, 256), DEVICES).sum(axis=0)
    yield "MoonEP", "max/mean load, from 3.03", "1.00", f"{max_over_mean(rows_D):.2f}"


def hits(published: str, here: str) -> str:
    """How many numbers are within 15 % of the published ones, or of their ranges."""
    pairs = list(zip(published.split(", "), map(float, here.split(", ")), strict=True))
    bounds = ((list(map(float, text.split("–"))), number) for text, number in pairs)
    num_near = sum((1 - WITHIN) * bound[0] <= number <= (1 + WITHIN) * bound[-1] for bound, number in bounds)
    return f"{num_near} of {len(pairs)}"


def main() -> None:
    """Print the rows, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", type=Path, help="file for benchmarks/results")
    given = parser.parse_args()
    table = [(*row, hits(*row[2:])) for row in rows()]
    for row in table:
        print(*row, sep=" | ")
    if given.result:
        question = "Do the simulated systems of others have the figures that their publications state?"
        write_result(given.result, question, ("system", "figure", "published", "here", "within 15 %"), table)


if __name__ == "__main__":
    main()
