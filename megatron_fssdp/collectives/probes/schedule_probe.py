"""Measures what the collectives of Parm's schedules cost, among the ranks that use them."""

import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.probes.device_timing import elapsed_s
from megatron_fssdp.collectives.rows.sharded_all_to_all import ShardedRoute, send_to_parts
from megatron_fssdp.collectives.rows.simultaneous_gather import SharedRoute, results_for_all
from megatron_fssdp.collectives.rows.uneven_all_gather import gather_rows, scatter_rows
from megatron_fssdp.collectives.rows.uneven_all_to_all import exchange_rows
from megatron_fssdp.planning.cost.cost_model import LinkCost, fit_link_cost
from megatron_fssdp.planning.cost.tensor_schedules import Group, Kind, ScheduleCosts

_SHARES = (1 / 8, 1 / 2, 1.0)
_NUM_REPETITIONS = 5
_LEAST_S = 1e-9  # a fit needs positive seconds

Probe = Callable[[int], tuple[float, Callable[[], object]]]
"""From rows for each device to the length of the whole tensor in bytes, and what to call."""


def measure_schedules(
    num_rows: int,
    like: torch.Tensor,
    *,
    parts: dist.ProcessGroup,
    num_parts: int,
    expert_parallel: dist.ProcessGroup,
    expert_tensor_parallel: dist.ProcessGroup | None,
    tensor_parallel: dist.ProcessGroup | None,
    devices_of_peers: Sequence[int],
    everyone: dist.ProcessGroup,
    simultaneous: bool,
) -> ScheduleCosts:
    """Alpha and beta of each collective (Parm, §V-A); called by all ranks of ``everyone`` at once.

    A time is the median of the repetitions after one that may connect, and the longest of all ranks.

    Args:
        num_rows: Rows that a rank sends in one exchange.
        like: Rows ``[*, M]`` whose width, dtype and device count.
        parts: The ranks of all parts of all experts.
        num_parts: Of each expert.
        expert_parallel: This rank's expert-parallel group.
        expert_tensor_parallel: The ranks that share its experts, if any.
        tensor_parallel: The ranks with the same tokens, if any.
        devices_of_peers: The device number of each of these.
        everyone: All ranks that measure: those that have to decide alike.
        simultaneous: Whether S2 would hand results on slice by slice.

    Returns:
        Costs of what there are groups for, by Parm's sizes: the length of the whole tensor.
    """
    width, element_bytes = like.shape[-1], like.element_size()
    num_devices = expert_parallel.size()

    def rows(number: int) -> torch.Tensor:
        return like.new_zeros(number, width)

    def to_parts(per_device: int) -> tuple[float, Callable[[], object]]:
        route = ShardedRoute(parts, num_parts, [per_device] * num_devices, [per_device] * parts.size())
        sent = rows(per_device * num_devices)
        return sent.nbytes * num_parts, lambda: send_to_parts((sent,), route)

    def of_devices(per_device: int) -> tuple[float, Callable[[], object]]:
        splits = [per_device] * num_devices
        sent = rows(per_device * num_devices)
        return sent.nbytes, lambda: exchange_rows((sent,), splits, splits, expert_parallel)

    def gathered(group: dist.ProcessGroup) -> Probe:
        def prepare(per_device: int) -> tuple[float, Callable[[], object]]:
            own = rows(per_device * num_devices)
            return own.nbytes * group.size(), lambda: gather_rows(own, [len(own)] * group.size(), group)

        return prepare

    def scattered(group: dist.ProcessGroup) -> Probe:
        def prepare(per_device: int) -> tuple[float, Callable[[], object]]:
            # Megatron's order sums in fp32.
            number = per_device * num_devices
            parts_of_sums = like.new_zeros(number * group.size(), width, dtype=torch.float32)
            num_bytes = len(parts_of_sums) * width * element_bytes
            return num_bytes, lambda: scatter_rows(parts_of_sums, [number] * group.size(), group)

        return prepare

    def handed_on(peers: dist.ProcessGroup) -> Probe:
        def prepare(per_device: int) -> tuple[float, Callable[[], object]]:
            own = ShardedRoute(parts, num_parts, [per_device] * num_devices, [per_device] * parts.size())
            shared = SharedRoute(own, peers, [own.send_D] * peers.size(), devices_of_peers)
            results = rows(per_device * parts.size())
            return results.nbytes, lambda: results_for_all((results,), shared, simultaneous=simultaneous)

        return prepare

    probes: dict[tuple[Kind, Group], Probe] = {}
    if parts.size() > 1:
        probes["all_to_all", "ep_esp"] = to_parts
    if num_devices > 1:
        probes["all_to_all", "ep"] = of_devices
    if expert_tensor_parallel is not None:
        probes["all_gather", "esp"] = gathered(expert_tensor_parallel)
        probes["reduce_scatter", "esp"] = scattered(expert_tensor_parallel)
    if tensor_parallel is not None:
        probes["all_gather", "mp"] = gathered(tensor_parallel)
        probes["overlapped_all_to_all", "ep_esp"] = handed_on(tensor_parallel)

    sizes = [max(1, round(num_rows * share / num_devices)) for share in _SHARES]
    calls = {name: [prepare(size) for size in sizes] for name, prepare in probes.items()}
    own_s = [_median_s(call, everyone, like.device) for found in calls.values() for _, call in found]
    seconds = torch.tensor(own_s, dtype=torch.float64, device=like.device)
    if seconds.numel():
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=everyone)
    longest = iter(seconds.tolist())
    times = {name: [next(longest) for _ in found] for name, found in calls.items()}
    costs: dict[tuple[Kind, Group], LinkCost] = {}
    for name, found in calls.items():
        taken = times[name]
        if name[0] == "overlapped_all_to_all":
            # What the exchange adds to the gather beside it, which Eq. 14 counts by itself.
            gather = times["all_gather", "mp"]
            taken = [max(_LEAST_S, both - alone) for both, alone in zip(taken, gather, strict=True)]
        costs[name] = fit_link_cost([num_bytes for num_bytes, _ in found], taken)
    return costs


def _median_s(call: Callable[[], object], everyone: dist.ProcessGroup, device: torch.device) -> float:
    seconds = []
    for _ in range(1 + _NUM_REPETITIONS):
        dist.barrier(group=everyone)
        seconds.append(elapsed_s(call, device))
    return statistics.median(seconds[1:])
