"""Measures the costs of the collectives of Parm's schedules among the ranks that use them (Parm, §V-A)."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.probes.collective_probe import median_s
from megatron_fssdp.dispatchers.parm.dual_collectives import gather_rows
from megatron_fssdp.dispatchers.parm.parm_groups import ParmGroups
from megatron_fssdp.dispatchers.parm.shared_route import SharedRoute
from megatron_fssdp.planning.cost.cost_model import LinkCost, fit_link_cost
from megatron_fssdp.planning.cost.tensor_schedules import Group, Kind, ScheduleCosts, ScheduledLayer

_SHARES = (1 / 8, 1 / 2, 1.0)
_NUM_REPETITIONS = 5
_LEAST_S = 1e-9  # The fit of alpha and beta needs positive times.

_Calls = dict[tuple[Kind, Group], tuple[int, Callable[[], object]]]


def measured_costs(
    layer: ScheduledLayer, like: Tensor, groups: ParmGroups, everyone: dist.ProcessGroup, simultaneous: bool
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
    most = layer.num_rows / layer.n_mp / groups.num_devices
    sizes = [max(1, round(most * share)) for share in _SHARES]
    calls = [_calls(size, like, groups, simultaneous=simultaneous) for size in sizes]
    own_s = [
        [median_s(call, everyone, like.device, _NUM_REPETITIONS) for _, call in found.values()]
        for found in calls
    ]
    seconds = torch.tensor(own_s, dtype=torch.float64, device=like.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=everyone)
    times = dict(zip(calls[0], seconds.T.tolist(), strict=True))
    costs: dict[tuple[Kind, Group], LinkCost] = {}
    for name, taken in times.items():
        if name[0] == "overlapped_all_to_all":
            # Eq. 14 counts the gather separately, so this is only the time that the exchange adds to it.
            gather = times["all_gather", "mp"]
            taken = [max(_LEAST_S, both - alone) for both, alone in zip(taken, gather, strict=True)]
        costs[name] = fit_link_cost([found[name][0] for found in calls], taken)
    return costs


def _calls(per_device: int, like: Tensor, groups: ParmGroups, *, simultaneous: bool) -> _Calls:
    """Each collective with this number of rows for each device: bytes of the whole tensor, and the call."""
    num_devices, num_ranks = groups.num_devices, groups.all_parts.size()
    own = like.new_zeros(per_device * num_devices, like.shape[-1])
    found: _Calls = {}
    for name, group in groups.by_name.items():
        size = group.size()
        if name in ("ep", "ep_esp"):
            sent = like.new_zeros(per_device * size, like.shape[-1])
            exchange = partial(dist.all_to_all_single, torch.empty_like(sent), sent, group=group)
            found["all_to_all", name] = sent.nbytes, exchange
        else:
            found["all_gather", name] = own.nbytes * size, partial(gather_rows, own, [len(own)] * size, group)
        if name == "esp":
            # Megatron sums in the data type of the probabilities.
            wide = own.float()
            scatter = partial(dist.reduce_scatter, torch.empty_like(wide), [wide] * size, group=group)
            found["reduce_scatter", name] = own.nbytes * size, scatter
        if name == "mp":
            device_Y, send_YD = groups.devices_of_peers(), [[per_device] * num_devices] * size
            route = SharedRoute(groups, device_Y, send_YD, [per_device] * num_ranks)
            results = like.new_zeros(per_device * num_ranks, like.shape[-1])
            collect = partial(route.collect, (results,), simultaneous=simultaneous)
            found["overlapped_all_to_all", "ep_esp"] = results.nbytes, collect
    return found
