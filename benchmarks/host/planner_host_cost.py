"""Times what the host plans for one layer, with compiled kernels and with the same kernels as plain Python.

``python -m benchmarks.host.planner_host_cost`` prints CPU milliseconds of one process: median, 10th and
90th percentile. Compiled and plain calls take turns, so that both see the same machine. Loads, owners and
costs are those of ``planner_time.py``. Shape letters: E experts, D devices.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.planner_time import DEVICES_PER_NODE, PROFILE, cases, drifted, owners
from megatron_fssdp.planning.balanced.quota_planner import quota_assignment, quota_dispatch
from megatron_fssdp.planning.cost.layer_traffic import dispatch_traffic, transfer_traffic
from megatron_fssdp.planning.dispatch.token_dispatch import TokenDispatch, plan_dispatch
from megatron_fssdp.planning.native import kernel
from megatron_fssdp.planning.native.kernel import KernelForm, kernel_form
from megatron_fssdp.planning.papers.prophet_model import ProphetModel
from megatron_fssdp.planning.papers.prophet_planner import plan_layers
from megatron_fssdp.planning.papers.sparse_materialization import sparse_materialization
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer

SIZES = [(64, 32), (256, 64), (512, 1024)]
SLOTS = 2


def rows(dispatch: TokenDispatch, device: int = 1) -> None:
    """Make what one rank sends."""
    dispatch.rows_from(device)


def calls_of(num_experts: int, num_devices: int) -> dict[str, Callable[[], object]]:
    """What is timed at one size, by its name."""
    topology = Topology.uniform(num_devices, max(num_devices // DEVICES_PER_NODE, 1))
    owner_E = owners(num_experts, num_devices)
    (before_DE,) = cases(num_experts, num_devices, 1)
    (counts_DE,) = drifted([before_DE])
    placement = sparse_materialization(
        owner_E, before_DE.sum(axis=0), topology, overlap_degree=num_experts, slots=SLOTS
    )
    transfer = two_level_transfer(placement, topology)
    link = PROFILE.cluster.inter
    prophet = ProphetModel(
        num_devices,
        PROFILE.token_bytes,
        PROFILE.expert_bytes,
        PROFILE.expert_bytes,
        1 / link.beta_s_per_byte,
        PROFILE.cluster.expert_flops_per_s / PROFILE.flops_per_token,
        PROFILE.non_moe_s,
        overlaps=True,
    )
    even = plan_dispatch("even", counts_DE, placement, topology)

    def quota() -> None:
        tokens_ED = quota_assignment(owner_E, counts_DE, topology, slots=SLOTS)
        rows(quota_dispatch(tokens_ED, counts_DE, topology))

    def transfer_of_new_placement() -> None:
        plan = two_level_transfer(ExpertPlacement(placement.owner_E, placement.present_ED), topology)
        transfer_traffic(plan, topology)

    return {
        "Pro-Prophet's plan": lambda: plan_layers(owner_E, counts_DE, prophet, [0], slots=SLOTS),
        "quota: plan and rows": quota,
        "exact dispatch (on the host): plan": lambda: plan_dispatch("exact", counts_DE, placement, topology),
        "even dispatch: rows": lambda: rows(even),
        "even dispatch: traffic": lambda: dispatch_traffic("even", counts_DE, placement, topology),
        "transfer plan and its traffic": transfer_of_new_placement,
        "traffic of a known transfer plan": partial(transfer_traffic, transfer, topology),
    }


def timed_ms(call: Callable[[], object], forms: list[KernelForm], min_total_s: float) -> list[np.ndarray]:
    """CPU milliseconds of single calls in each form; the forms take turns."""
    times_ms: list[list[float]] = [[] for _ in forms]
    begin = time.perf_counter()
    while len(times_ms[0]) < 12 or time.perf_counter() - begin < min_total_s:
        for form, own_ms in zip(forms, times_ms, strict=True):
            kernel.set_form(form)
            call()  # the first call looks the kernels up
            for _ in range(5):
                start_s = time.process_time()
                call()
                own_ms.append(1e3 * (time.process_time() - start_s))
    return [np.percentile(own_ms, [50, 10, 90]) for own_ms in times_ms]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="minimum seconds for each row")
    parser.add_argument(
        "--sizes", type=int, default=2, help="how many sizes, small ones first; the third takes minutes"
    )
    arguments = parser.parse_args()
    forms = [KernelForm(False, "for comparison")]
    if kernel_form().is_compiled:
        forms.insert(0, KernelForm(True))
    else:
        print(f"planning kernels: {kernel_form()}; nothing to compare with")
    print(
        f"{'CPU ms: median [10th, 90th percentile]':<36} {'E, D':<10}", *(f"{str(f)[:8]:>28}" for f in forms)
    )
    for size in SIZES[: arguments.sizes]:
        for name, call in calls_of(*size).items():
            found = timed_ms(call, forms, arguments.seconds)
            shown = [f"{m:9.3f} [{low:7.3f}, {high:7.3f}]" for m, low, high in found]
            print(f"{name:<36} {size[0]}, {size[1]:<6}", *shown)


if __name__ == "__main__":
    main()
