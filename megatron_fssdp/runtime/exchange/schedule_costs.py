"""Measures the costs of the collectives of Parm's schedules among the ranks of one layer."""

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
    """Measure the collectives with messages of a layer's size; all ranks of ``everyone`` call it at once.

    Args:
        layer: Sizes of the layer, which give the number of rows to exchange.
        like: Example tensor ``[*, M]``; the measured rows have its width, dtype and device.
        groups: Process groups of the layer.
        everyone: Process group of all ranks that must take the same decision from these costs.
        simultaneous: Whether S2 passes results on slice by slice (SAA).

    Returns:
        Alpha and beta of each collective.
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
