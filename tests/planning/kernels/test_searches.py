"""Kernels of planners and transfers give equal answers in both forms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.balanced import quota_planner
from megatron_fssdp.planning.cost import dispatch_sums, layer_traffic, owner_traffic
from megatron_fssdp.planning.papers import prophet_planner
from megatron_fssdp.planning.papers.prophet_model import ProphetModel
from megatron_fssdp.planning.placement.replica_sets import ReplicaSets
from megatron_fssdp.planning.transfer import transfer_plan
from tests.drawn_examples import examples

from ..kernel_forms import needs_compiled
from ..placement_cases import placements, random_counts_DE

KERNELS = [
    (quota_planner, "spill"),
    (prophet_planner, "greedy_steps"),
    (transfer_plan, "two_level_edges"),
    (transfer_plan, "first_wrong_edge"),
    (layer_traffic, "sum_edges"),
    (layer_traffic, "sum_two_level_edges"),
    (owner_traffic, "sum_owner_tokens"),
    (owner_traffic, "keep_replicas_tokens"),
    (owner_traffic, "busiest_of_cases"),
    (dispatch_sums, "find_busiest"),
]


def plans(is_compiled, placement, topology, counts_DE, seed):
    """What all these kernels are for, in one of their forms."""
    num_devices = topology.num_devices
    left_out, overlaps = seed % num_devices, seed % 2 == 0
    model = ProphetModel(num_devices, 4096.0, 1 << 16, 1 << 16, 1e8, 1e6, overlaps=overlaps)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in KERNELS:
            kernel = type(getattr(module, name))(getattr(module, name).plain)
            kernel.select_form(is_compiled)
            patch.setattr(module, name, kernel)
        planned = prophet_planner.plan_layers(
            placement.owner_E, counts_DE, model, [left_out], balance=0.1, slots=seed % 3
        )
        transfer = transfer_plan._two_level_transfer(placement, topology)
        expert_P, device_P = np.nonzero(placement.present_ED)
        is_replica_P = device_P != placement.owner_E[expert_P]
        replicas = expert_P[is_replica_P], device_P[is_replica_P]
        several = ReplicaSets(*np.tile(replicas, 2), np.array([1, 1, 2]) * len(replicas[0]))
        traffic = owner_traffic.OwnerTraffic(counts_DE, placement.owner_E, topology)
        return (
            quota_planner.quota_assignment(placement.owner_E, counts_DE, topology, slots=seed % 4).tolist(),
            planned.seconds,
            planned.placement(0),
            transfer.edges,
            layer_traffic._transfer_traffic(transfer, topology),
            _lists(layer_traffic.two_level_traffic(placement.owner_E, several, topology)),
            traffic.busiest(several).tolist(),
            traffic.of(placement).busiest,
        )


def _lists(traffic):
    """The numbers of several transfers, so that they can be compared."""
    fields = (
        *vars(traffic.busiest).values(),
        *traffic.fill_hops,
        traffic.num_hops,
        traffic.num_between_nodes,
    )
    return [np.asarray(field).tolist() for field in fields]


@needs_compiled
@examples(100)
@given(placements(), st.integers(0, 2**32 - 1))
def test_both_forms_make_equal_plans(case, seed):
    topology, placement = case
    counts_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts).astype(np.int64)
    arguments = placement, topology, counts_DE, seed
    assert plans(False, *arguments) == plans(True, *arguments)
