"""Measures the costs of the collectives of Parm's schedules among the ranks that use them."""

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
_LEAST_S = 1e-9  # The fit of alpha and beta needs positive times.

Probe = Callable[[int], tuple[float, Callable[[], object]]]
"""Maps a number of rows for each device to the size of the whole tensor in bytes and the call to measure."""


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
    """Measure alpha and beta of each collective (Parm, §V-A); all ranks of ``everyone`` call it at once.

    A rank's time is the median of its repetitions after a warm-up call, which includes the time to connect.
    The result uses the longest time of all ranks.

    Args:
        num_rows: Number of rows that a rank sends in one exchange.
        like: Example tensor ``[*, M]``; the measured rows have its width, dtype and device.
        parts: Process group of the ranks of all parts of all experts.
        num_parts: Number of parts of each expert.
        expert_parallel: Process group of this rank's expert parallelism.
        expert_tensor_parallel: Process group of the ranks that share this rank's experts; ``None`` if experts
            are whole.
        tensor_parallel: Process group of the ranks with the same tokens; ``None`` if no other rank has them.
        devices_of_peers: Device number of each rank of ``tensor_parallel``.
        everyone: Process group of all ranks that must take the same decision from these costs.
        simultaneous: Whether S2 passes results on slice by slice (SAA).

    Returns:
        Costs of the collectives whose groups exist, by Parm's message size: bytes of the whole tensor.
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
            # Schedule megatron sums in fp32.
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
            # Eq. 14 counts the gather separately, so this is only the time that the exchange adds to it.
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
