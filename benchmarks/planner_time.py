"""Times the planners on one core: medians and percentiles of CPU and wall time, without a limit to pass.

Run: ``python benchmarks/planner_time.py``. On a shared machine, CPU time is more reliable than wall time, and
its 10th percentile more than its median. Popularities are log-normal, tokens are multinomial, and a node has
8 devices. Shape letters: E experts, D devices.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import get_args

import numpy as np

from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy, plan_dispatch
from megatron_fssdp.planning.papers.prophet_model import ProphetModel
from megatron_fssdp.planning.papers.prophet_planner import plan_layers
from megatron_fssdp.planning.papers.shadow_selection import ShadowingCosts, select_shadows
from megatron_fssdp.planning.papers.sparse_materialization import sparse_materialization
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.quotas import quota_assignment
from megatron_fssdp.planning.search import layer_search, plan_materialization
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer

DEVICES_PER_NODE = 8
TOKENS_PER_DEVICE = 8192  # (token, k) pairs per device and layer, for example 4096 tokens with top-2
DRIFT_SIGMA = 0.3  # standard deviation of the change of this logarithm after the placement was planned
LOAD_SIGMA = 1.0  # standard deviation of the logarithm of an expert's popularity
# Costs for strategies that weigh seconds: present-day links and devices, and an expert of 16 MiB.
INTER = LinkCost(1e-5, 1 / 50e9)
PROFILE = LayerProfile(
    non_moe_s=1e-3,
    cluster=ClusterCost(LinkCost(5e-6, 1 / 400e9), INTER, expert_flops_per_s=4e14),
    expert_bytes=16 << 20,
    token_bytes=4096.0,
    flops_per_token=float(16 << 20),
    memory_capacity=2,
)
# (experts, devices, slots): 2 slots, and also E/D slots if this is more.
SIZES = [(16, 8, 2), (64, 32, 2), (64, 64, 2), (256, 64, 2), (256, 64, 4), (512, 1024, 2)]


def cases(num_experts: int, num_devices: int, num_cases: int) -> list[np.ndarray]:
    """Return reproducible router counts of several layers, int64 ``[D, E]`` each."""
    layers = []
    for seed in range(num_cases):
        rng = np.random.default_rng(seed)
        popularity_E = rng.lognormal(sigma=LOAD_SIGMA, size=num_experts)
        popularity_E /= popularity_E.sum()
        layers.append(rng.multinomial(TOKENS_PER_DEVICE, popularity_E, size=num_devices).astype(np.int64))
    return layers


def owners(num_experts: int, num_devices: int) -> np.ndarray:
    """Return even owners, int64 ``[E]``.

    With fewer experts than devices, evenly spaced devices own one each.
    """
    if num_experts >= num_devices:
        return even_owners(num_experts, num_devices)
    return np.arange(num_experts, dtype=np.int64) * (num_devices // num_experts)


def timed_s(calls: list[Callable[[], object]], min_total_s: float) -> tuple[list[float], list[float]]:
    """Return CPU and wall seconds of single calls.

    The calls take turns for at least ``min_total_s`` seconds.
    """
    for call in calls:
        call()
    cpu_s: list[float] = []
    wall_s: list[float] = []
    begin = time.perf_counter()
    while len(cpu_s) < 20 or time.perf_counter() - begin < min_total_s:
        for call in calls:
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            call()
            cpu_s.append(time.process_time() - cpu_start)
            wall_s.append(time.perf_counter() - wall_start)
    return cpu_s, wall_s


def report(name: str, size: str, samples_s: tuple[list[float], list[float]], note: str = "") -> None:
    """Print one row in milliseconds: median, 10th and 90th percentile of CPU and of wall time."""
    numbers = [
        f"{value * 1e3:8.3f}" for times_s in samples_s for value in np.percentile(times_s, [50, 10, 90])
    ]
    print(f"{name:<36} {size:<22} {' '.join(numbers)} {len(samples_s[0]):6d}  {note}")


def max_over_mean(load_DE: np.ndarray, placement: ExpertPlacement, topology: Topology) -> float:
    """Return the modelled max/mean device load of a placement."""
    load_D = plan_dispatch("even", load_DE, placement, topology).device_tokens_D
    return float(load_D.max() / load_D.mean())


def drifted(counts: list[np.ndarray]) -> list[np.ndarray]:
    """Return counts of a later iteration: as many tokens, and popularities with log-normal noise."""
    later = []
    for seed, counts_DE in enumerate(counts):
        rng = np.random.default_rng(1000 + seed)
        popularity_E = counts_DE.sum(axis=0) * rng.lognormal(sigma=DRIFT_SIGMA, size=counts_DE.shape[1])
        shape = counts_DE.shape[0]
        later.append(rng.multinomial(TOKENS_PER_DEVICE, popularity_E / popularity_E.sum(), size=shape))
    return later


def measure_policies(
    size: str, plans: list[ExpertPlacement], counts: list[np.ndarray], topology: Topology, min_total_s: float
) -> None:
    """Print time and balance of each dispatch policy, under placements that were planned for other loads."""
    for policy in get_args(DispatchPolicy):

        def exchange(i: int, policy: DispatchPolicy = policy) -> None:
            dispatch = plan_dispatch(policy, counts[i], plans[i], topology)
            dispatch.sent_ED(1)

        loads = [
            plan_dispatch(policy, counts_DE, plan, topology).device_tokens_D
            for counts_DE, plan in zip(counts, plans, strict=True)
        ]
        ratios = [load_D.max() / load_D.mean() for load_D in loads]
        note = f"max/mean tokens after drift {np.mean(ratios):.3f}"
        calls = [partial(exchange, i) for i in range(len(plans))]
        report(f"{policy} dispatch row", size, timed_s(calls, min_total_s), note)


def measure(num_experts: int, num_devices: int, slots: int, num_cases: int, min_total_s: float) -> None:
    """Print the rows of one size."""
    size = f"E={num_experts} D={num_devices} slots={slots}"
    topology = Topology.uniform(num_devices, max(num_devices // DEVICES_PER_NODE, 1))
    owner_E = owners(num_experts, num_devices)
    counts = cases(num_experts, num_devices, num_cases)
    loads = [counts_DE.astype(np.float64) for counts_DE in counts]
    loads_E = [load_DE.sum(axis=0) for load_DE in loads]

    def plan(i: int) -> ExpertPlacement:
        return plan_materialization(owner_E, loads[i], topology, overlap_degree=num_experts, slots=slots)

    def first(i: int) -> ExpertPlacement:
        return sparse_materialization(owner_E, loads_E[i], topology, overlap_degree=num_experts, slots=slots)

    plain = ExpertPlacement.owners_only(owner_E, num_devices)
    firsts = [first(i) for i in range(num_cases)]
    plans = [plan(i) for i in range(num_cases)]

    def dispatch(i: int, placement: ExpertPlacement) -> None:
        plan_dispatch("even", counts[i], placement, topology).sent_ED(1)

    def dispatch_cold(i: int) -> None:
        dispatch(i, ExpertPlacement(plans[i].owner_E, plans[i].present_ED))

    def row(name: str, call: Callable[[int], object], note: str = "") -> None:
        report(name, size, timed_s([partial(call, i) for i in range(num_cases)], min_total_s), note)

    ratios = [
        np.mean([max_over_mean(loads[i], placement, topology) for i, placement in enumerate(several)])
        for several in ([plain] * num_cases, firsts, plans)
    ]
    note = "max/mean load: owners only {:.2f}, Alg. 1 {:.2f}, plan {:.2f}".format(*ratios)
    row("plan_materialization", plan, note)
    row("sparse_materialization", first)
    row("dispatch row", lambda i: dispatch(i, plans[i]))
    row("dispatch row, owners only", lambda i: dispatch(i, plain))
    row("dispatch row, new placement", dispatch_cold)
    row("device_tokens_D", lambda i: plan_dispatch("even", counts[i], plans[i], topology).device_tokens_D)
    measure_policies(size, plans, drifted(counts), topology, min_total_s)
    row("two_level_transfer", lambda i: two_level_transfer(plans[i], topology))
    # The planners of the other strategies, and our planner that decides by seconds.
    costs = (PROFILE.token_bytes, PROFILE.expert_bytes, PROFILE.expert_bytes, PROFILE.flops_per_token)
    shadowing = ShadowingCosts(*costs, PROFILE.cluster.expert_flops_per_s, 1 / INTER.beta_s_per_byte)
    prophet = ProphetModel(
        num_devices,
        PROFILE.token_bytes,
        PROFILE.expert_bytes,
        PROFILE.expert_bytes,
        1 / INTER.beta_s_per_byte,
        PROFILE.cluster.expert_flops_per_s / PROFILE.flops_per_token,
        PROFILE.non_moe_s,
        overlaps=True,
    )
    row("quota_assignment", lambda i: quota_assignment(owner_E, counts[i], topology, slots=slots))
    row("select_shadows", lambda i: select_shadows(owner_E, counts[i], shadowing))
    row("Pro-Prophet's plan_layers", lambda i: plan_layers(owner_E, counts[i], prophet, [0], slots=slots))
    row(
        "best_placement",
        lambda i: layer_search(
            owner_E, loads[i], topology, PROFILE, rematerialize=False, hides=True
        ).best_placement(slots=slots, most_replicated=num_experts),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="minimum seconds for each row")
    parser.add_argument("--cases", type=int, default=8, help="number of different loads for each row")
    arguments = parser.parse_args()
    columns = [f"{clock} {what}" for clock in ("cpu", "wall") for what in ("med", "p10", "p90")]
    print(f"{'what (ms)':<36} {'size':<22} {' '.join(f'{name:>8}' for name in columns)} {'calls':>6}")
    for num_experts, num_devices, slots in SIZES:
        measure(num_experts, num_devices, slots, arguments.cases, arguments.seconds)


if __name__ == "__main__":
    main()
