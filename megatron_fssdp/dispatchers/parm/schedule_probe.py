"""Measures the costs of the collectives of Parm's schedules among the ranks that use them (Parm, §V-A)."""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.probes.device_timing import elapsed_s
from megatron_fssdp.dispatchers.parm.dual_collectives import gather_rows
from megatron_fssdp.dispatchers.parm.parm_groups import ParmGroups
from megatron_fssdp.dispatchers.parm.shared_route import SharedRoute
from megatron_fssdp.planning.cost.cost_model import LinkCost, fit_link_cost
from megatron_fssdp.planning.cost.tensor_schedules import Group, Kind, ScheduleCosts, ScheduledLayer

_SHARES = (1 / 8, 1 / 2, 1.0)
_NUM_REPETITIONS = 5
_LEAST_S = 1e-9  # The fit of alpha and beta needs positive times.

Probe = Callable[[int], tuple[float, Callable[[], object]]]
"""Maps a number of rows for each device to the bytes of the whole tensor and the call to measure."""


def measured_costs(
    layer: ScheduledLayer,
    like: Tensor,
    groups: ParmGroups,
    everyone: dist.ProcessGroup,
    *,
    simultaneous: bool,
) -> ScheduleCosts:
    """Measure alpha and beta of each collective; all ranks of ``everyone`` call it at once.

    A rank's time is the median of its repetitions after a warm-up call, which includes the time to connect.
    The result uses the longest time of all ranks.

    Args:
        layer: Sizes of the layer, which give the number of rows to exchange.
        like: Example tensor ``[..., M]``; the measured rows have its width, dtype and device.
        groups: Process groups of the layer.
        everyone: Process group of all ranks that must take the same decision from these costs.
        simultaneous: Whether S2 passes results on slice by slice (SAA).

    Returns:
        Costs of the collectives whose groups exist, by Parm's message size: bytes of the whole tensor.
    """
    probes = _probes(like, groups, simultaneous=simultaneous)
    most = layer.num_rows / layer.n_mp / groups.num_devices
    sizes = [max(1, round(most * share)) for share in _SHARES]
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
            # Eq. 14 counts the gather separately, so this is only the time that the exchange adds to it.
            gather = times["all_gather", "mp"]
            taken = [max(_LEAST_S, both - alone) for both, alone in zip(taken, gather, strict=True)]
        costs[name] = fit_link_cost([num_bytes for num_bytes, _ in found], taken)
    return costs


def _probes(like: Tensor, groups: ParmGroups, *, simultaneous: bool) -> dict[tuple[Kind, Group], Probe]:
    width, num_devices, by_name = like.shape[-1], groups.num_devices, groups.by_name

    def exchanged(group: dist.ProcessGroup) -> Probe:
        def prepare(per_device: int) -> tuple[float, Callable[[], object]]:
            sent = like.new_zeros(per_device * group.size(), width)
            received = torch.empty_like(sent)
            return sent.nbytes, lambda: dist.all_to_all_single(received, sent, group=group)

        return prepare

    def gathered(group: dist.ProcessGroup) -> Probe:
        def prepare(per_device: int) -> tuple[float, Callable[[], object]]:
            own = like.new_zeros(per_device * num_devices, width)
            return own.nbytes * group.size(), lambda: gather_rows(own, [len(own)] * group.size(), group)

        return prepare

    def scattered(group: dist.ProcessGroup) -> Probe:
        def prepare(per_device: int) -> tuple[float, Callable[[], object]]:
            # Megatron sums in the data type of the probabilities.
            own = like.new_zeros(per_device * num_devices, width, dtype=torch.float32)
            num_bytes = own.numel() * like.element_size() * group.size()
            pieces = [own] * group.size()
            return num_bytes, lambda: dist.reduce_scatter(torch.empty_like(own), pieces, group=group)

        return prepare

    def collected(device_Y: list[int]) -> Probe:
        def prepare(per_device: int) -> tuple[float, Callable[[], object]]:
            send_YD = [[per_device] * num_devices] * len(device_Y)
            route = SharedRoute(groups, device_Y, send_YD, [per_device] * groups.all_parts.size())
            rows = like.new_zeros(per_device * groups.all_parts.size(), width)
            return rows.nbytes, lambda: route.collect((rows,), simultaneous=simultaneous)

        return prepare

    probes: dict[tuple[Kind, Group], Probe] = {}
    for name in ("ep", "ep_esp"):
        if name in by_name:
            probes["all_to_all", name] = exchanged(by_name[name])
    if "esp" in by_name:
        probes["all_gather", "esp"] = gathered(by_name["esp"])
        probes["reduce_scatter", "esp"] = scattered(by_name["esp"])
    if "mp" in by_name:
        probes["all_gather", "mp"] = gathered(by_name["mp"])
        probes["overlapped_all_to_all", "ep_esp"] = collected(groups.devices_of_peers())
    return probes


def _median_s(call: Callable[[], object], everyone: dist.ProcessGroup, device: torch.device) -> float:
    seconds = []
    for _ in range(1 + _NUM_REPETITIONS):
        dist.barrier(group=everyone)
        seconds.append(elapsed_s(call, device))
    return statistics.median(seconds[1:])
