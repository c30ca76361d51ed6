"""What the collectives of Parm's schedules cost among the ranks of one layer."""

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.probes.schedule_probe import measure_schedules
from megatron_fssdp.planning.cost.tensor_schedules import ScheduleCosts, ScheduledLayer
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups


def measured_costs(
    layer: ScheduledLayer,
    like: torch.Tensor,
    groups: ExpertGroups,
    everyone: dist.ProcessGroup,
    *,
    simultaneous: bool,
) -> ScheduleCosts:
    """Measure at a layer's size; called by all ranks of ``everyone`` at once.

    Args:
        layer: How many rows are exchanged.
        like: Rows ``[*, M]`` whose width, dtype and device count.
        groups: The layer's.
        everyone: All ranks that measure: those that have to decide alike.
        simultaneous: Whether S2 would hand results on slice by slice.
    """
    return measure_schedules(
        round(layer.num_rows / layer.n_mp),
        like,
        parts=groups.parts or groups.expert_parallel,
        num_parts=groups.num_parts,
        expert_parallel=groups.expert_parallel,
        expert_tensor_parallel=groups.expert_tensor_parallel,
        tensor_parallel=groups.tensor_parallel,
        devices_of_peers=groups.devices_of_peers,
        everyone=everyone,
        simultaneous=simultaneous,
    )
