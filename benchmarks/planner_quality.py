"""Compares the replica search with the best placements that simulated annealing finds.

Run: ``python benchmarks/planner_quality.py --layers 200``. Both use the price of the search, so the ratio
tells what the search misses, not how well the price predicts a training. Popularities are log-normal with the
sigmas 0.5, 1.0 and 1.5 in turn, tokens are multinomial, and every device has 2 slots. Annealing starts with
the owners and with the search's result. Shape letters: D devices, E experts.
"""

import argparse
import math
import time

import numpy as np

from megatron_fssdp.config.cluster_files import load_cluster
from megatron_fssdp.planning.cost.cluster_cost import cluster_cost
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.search import LayerSearch, SearchCosts
from megatron_fssdp.planning.transfer.message_size import CUDA_MESSAGES, HOST_MESSAGES, MessageRule

SLOTS = 2
SIZES = [(16, 8), (64, 32)]
SIGMAS = (0.5, 1.0, 1.5)
HOT, COLD = 0.03, 1e-5  # first and last temperature of annealing, as parts of the seconds at its start
TESTBED = ClusterCost(LinkCost(338e-6, 1 / 0.83e9), LinkCost(338e-6, 1 / 47.5e6), 200e9)  # 400 Mbit/s NICs
# Name: cluster, nodes, hidden size, FFN size, matrices of an expert, bytes of an element, attention seconds,
# pairs of a device, messages.
CASES: dict[str, tuple[ClusterCost, int, int, int, int, int, float, int, MessageRule]] = {
    "hecate-a": (cluster_cost(load_cluster("hecate-a")), 4, 1024, 4096, 2, 2, 1.5e-3, 8192, CUDA_MESSAGES),
    "h200, 1 node": (cluster_cost(load_cluster("h200")), 1, 2048, 1024, 3, 2, 4e-4, 32768, CUDA_MESSAGES),
    "testbed": (TESTBED, 4, 256, 1024, 2, 4, 25e-3, 2048, HOST_MESSAGES),
}


def layer_of(name: str, num_experts: int, num_devices: int, seed: int) -> LayerSearch:
    """Return one layer with random loads."""
    cluster, num_nodes, hidden, ffn, matrices, element, attention_s, pairs, messages = CASES[name]
    rng = np.random.default_rng(seed)
    popularity_E = rng.lognormal(sigma=SIGMAS[seed % len(SIGMAS)], size=num_experts)
    load_DE = rng.multinomial(pairs, popularity_E / popularity_E.sum(), size=num_devices).astype(float)
    profile = LayerProfile(
        non_moe_s=attention_s,
        cluster=cluster,
        expert_bytes=matrices * hidden * ffn * element,
        token_bytes=hidden * element,
        flops_per_token=2.0 * matrices * hidden * ffn,
        memory_capacity=SLOTS,
        messages=messages,
    )
    topology = Topology.uniform(num_devices, num_nodes)
    costs = SearchCosts.of_profile(profile, topology, num_experts, rematerialize=False, hides=True)
    return LayerSearch(even_owners(num_experts, num_devices), load_DE, topology, costs)


def changed(present_ED: np.ndarray, owner_E: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
    """Return presence after a random move: a replica more, less, elsewhere or in place of another one."""
    num_experts, num_devices = present_ED.shape
    expert, device = int(rng.integers(num_experts)), int(rng.integers(num_devices))
    if owner_E[expert] == device:
        return None
    new_ED = present_ED.copy()
    new_ED[expert, device] = not present_ED[expert, device]
    if present_ED[expert, device]:
        if rng.random() < 0.5:
            new_ED[expert, int(rng.integers(num_devices))] = True
    else:
        replicas = np.flatnonzero(present_ED[:, device] & (owner_E != device))
        if len(replicas) >= SLOTS:
            new_ED[int(rng.choice(replicas)), device] = False
    replicas_D = new_ED.sum(axis=0) - np.bincount(owner_E, minlength=num_devices)
    return new_ED if replicas_D.max() <= SLOTS else None


def annealed_s(layer: LayerSearch, start: ExpertPlacement, num_steps: int, seed: int) -> float:
    """Return the fewest seconds that annealing meets."""
    rng = np.random.default_rng(seed)
    present_ED, seconds = start.present_ED.copy(), layer.seconds(start)
    best_s = first_s = seconds
    for step in range(num_steps):
        new_ED = changed(present_ED, layer.owner_E, rng)
        if new_ED is None:
            continue
        new_s = layer.seconds(ExpertPlacement(layer.owner_E, new_ED))
        temperature = first_s * HOT * (COLD / HOT) ** (step / num_steps)
        if new_s <= seconds or rng.random() < math.exp((seconds - new_s) / temperature):
            present_ED, seconds = new_ED, new_s
            best_s = min(best_s, seconds)
    return best_s


def measure(name: str, num_experts: int, num_devices: int, num_layers: int, num_steps: int) -> None:
    """Print one row: ratios to the best known placement, and CPU time of the search."""
    ratios, plain_ratios, cpu_s = [], [], []
    for seed in range(num_layers):
        layer = layer_of(name, num_experts, num_devices, seed)
        begin = time.process_time()
        found, found_s = layer.best_placement(slots=SLOTS, most_replicated=num_experts, least_saving=0.0)
        cpu_s.append(time.process_time() - begin)
        plain = ExpertPlacement.owners_only(layer.owner_E, num_devices)
        best_s = min(found_s, *(annealed_s(layer, start, num_steps, seed) for start in (plain, found)))
        ratios.append(found_s / best_s)
        plain_ratios.append(layer.seconds(plain) / best_s)
    median, p90, worst = np.percentile(ratios, [50, 90, 100])
    low_ms, cpu_ms, high_ms = 1e3 * np.percentile(cpu_s, [10, 50, 90])
    print(
        f"{name:<14} E={num_experts:<4} D={num_devices:<4} search / best: median {median:.4f}, "
        f"90 % {p90:.4f}, worst {worst:.4f}; owners only / best: {np.median(plain_ratios):.3f}; "
        f"CPU ms {cpu_ms:.2f} [{low_ms:.2f}, {high_ms:.2f}]",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=20, help="number of random layers of each row")
    parser.add_argument("--steps", type=int, default=20_000, help="moves that each annealing tries")
    arguments = parser.parse_args()
    for name in CASES:
        for num_experts, num_devices in SIZES:
            measure(name, num_experts, num_devices, arguments.layers, arguments.steps)


if __name__ == "__main__":
    main()
