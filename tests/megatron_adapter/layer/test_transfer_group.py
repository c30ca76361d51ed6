"""NCCL options and time-out of the transfer group, and points of the program on devices with one queue."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fssdp.collectives import transfer_lanes
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.layer import strategy_session
from megatron_fssdp.megatron_adapter.layer.moe_layer import _install_beginning
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime
from tests.support.training_preload import on_ranks

from ..training_run import note, train_on_all_ranks, wrap


def test_transfers_have_high_priority_unless_a_file_says_otherwise(tmp_path):
    path = tmp_path / "nccl.yaml"
    for text, wanted in (
        ("ep: {max_ctas: 32}", {"is_high_priority_stream": True, "max_ctas": 8}),
        ("fssdp: {max_ctas: 16}", {"is_high_priority_stream": True, "max_ctas": 16}),
        ("fssdp: {is_high_priority_stream: false}", {"is_high_priority_stream": False, "max_ctas": 8}),
    ):
        path.write_text(text)
        host = SimpleNamespace(nccl_communicator_config_path=str(path))
        assert strategy_session.nccl_options(host) == wanted


@pytest.mark.parametrize(
    ("backend", "connections", "wanted"),
    [("nccl", "1", True), ("nccl", "8", False), ("nccl", "", False), ("gloo", "1", False)],
)
def test_one_connection_means_one_queue_on_gpus(monkeypatch, backend, connections, wanted):
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    assert strategy_session.has_one_queue(None) is wanted


def note_timeouts():
    def begin_iteration(begin, self, *args):
        groups = self.layers[0].groups
        assert groups.transfers is not None
        for group in (groups.expert_parallel, groups.transfers):
            note(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
        begin(self, *args)

    wrap(MoERuntime, "begin_iteration", begin_iteration)


def test_process_groups_of_transfers_have_megatrons_timeout(text_data):
    arguments = "{EP2} --train-iters 2 --distributed-timeout-minutes 7"
    for run in train_on_all_ranks(2, arguments, text_data, strategy="fssdp", before=note_timeouts):
        assert run.notes == (420, 420, 420, 420)


@on_ranks(3)
def test_ranks_of_a_node_share_slots_and_nodes_of_one_rank_are_refused():
    made = strategy_session.create_node_slots(dist.group.WORLD, Topology((0, 0, 1)))
    with pytest.raises(ConfigurationError, match=r"^FSSDP_PEER_PUTS:"):
        strategy_session.create_node_slots(dist.group.WORLD, Topology((0, 1, 2)))
    assert (made is None) == (dist.get_rank() == 2)
    if made is not None:
        assert (made.devices, dist.get_process_group_ranks(made.group)) == ((0, 1), [0, 1])
        assert made.timeout == dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout


@on_ranks(2)
def test_the_group_is_no_part_of_a_communicator_that_is_bound_to_a_device():
    """Rank 0 alone creates a group, while the default group is bound to a device."""
    seen, rank = [], dist.get_rank()

    def create_group(*args, **kwargs):
        seen.append(dist.group.WORLD.bound_device_id)
        return dist.new_group(args[0], use_local_synchronization=True)

    parallel_state.create_group = create_group
    own = [dist.new_group([member]) for member in range(2)][rank]
    device = dist.group.WORLD.bound_device_id = torch.device("cpu", 0)
    if rank == 0:
        group = strategy_session.create_transfer_group(own, strategy_session.DEFAULT_OPTIONS)
        assert dist.get_process_group_ranks(group) == [0]
        assert seen == [None]
    assert dist.group.WORLD.bound_device_id == device
    dist.group.WORLD.bound_device_id = None


class FakeLayer(torch.nn.Module):
    """A transformer layer whose attention has two parts; the second one returns its bias as well."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(overlap_moe_expert_parallel_comm=False)
        self.self_attention = torch.nn.Module()
        self.self_attention.qkv = torch.nn.Linear(2, 2)
        self.self_attention.proj = WithBias(2, 2)

    def forward(self, hidden):
        output, _ = self.self_attention.proj(self.self_attention.qkv(hidden))
        return output

    _te_cuda_graph_replay = forward


class WithBias(torch.nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden), None


@pytest.mark.parametrize("one_queue", [False, True])
def test_a_layer_begins_with_its_gather_and_parts_of_attention_are_points_if_there_is_one_queue(
    monkeypatch, one_queue
):
    group, order = object(), []
    lane = SimpleNamespace(advance=lambda: order.append("point"))
    monkeypatch.setattr(transfer_lanes, "_stream_lanes", {group: {"weights": lane}})
    groups = SimpleNamespace(one_queue=one_queue, transfers=group)
    groups.advance_transfers = partial(ExpertGroups.advance_transfers, groups)
    slots = SimpleNamespace(groups=groups, local=SimpleNamespace(), mark=lambda *_: None)
    slots.launch = lambda hidden: order.append("gather")
    moe = SimpleNamespace(slot_layer=slots)
    layer, points = FakeLayer(), ["point"] * (2 if one_queue else 0)
    _install_beginning(layer, moe, layer)
    output = layer(torch.ones(1, 2, requires_grad=True))
    assert order == ["gather", *points]
    output.sum().backward()
    assert order == ["gather", *points, *points]
    with torch.no_grad():
        layer._te_cuda_graph_replay(torch.ones(1, 2))
    assert order[1 + 2 * len(points) :] == ["gather", *points]
    assert not {**layer._forward_pre_hooks, **layer._forward_hooks}, (
        "CUDA graphs capture no module with hooks"
    )
