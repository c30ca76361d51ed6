from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.config.cluster_description import cluster_yaml, load_cluster
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.megatron_adapter.diagnosis import cluster_profiler
from megatron_fssdp.megatron_adapter.diagnosis.cluster_profiler import ProfileSettings, measure_cluster
from megatron_fssdp.planning.cost.cost_model import LinkCost, LinkFit
from tests.support.training_preload import on_plain_ranks

CPU = torch.device("cpu")
SETTINGS = ProfileSettings("box", least_bytes=1 << 10, most_bytes=1 << 14, num_repetitions=1)


@on_plain_ranks(4)
def test_all_ranks_agree_and_rank_0_reports_every_step(tmp_path):
    lines, of_ranks, settings = [], [None] * 4, replace(SETTINGS, model=load_run(["gpt_moe_tiny"]))
    cluster = measure_cluster(settings, 2, CPU, 4, lines.append)
    dist.all_gather_object(of_ranks, cluster)
    assert of_ranks == [cluster] * 4
    if dist.get_rank():
        assert not lines
        return
    assert [line.partition("]")[0] for line in lines[1:]] == [f"[{step:2}/15" for step in range(1, 16)]
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 2)
    assert all(set(classes) == {"intra_node", "inter_node"} for classes in cluster.collectives.values())
    assert len(cluster.collectives) == 6
    assert 1e6 < cluster.expert_flops_per_s < 1e14
    assert 1e6 < cluster.non_expert_flops_per_s < 1e14
    shape = "LayerShape(model_dim=64, ffn_dim=128, num_experts=2, num_rows=1024,"
    assert shape in cluster.sources["expert_flops_per_s"]
    path = tmp_path / "box.yaml"
    path.write_text(cluster_yaml(cluster), encoding="utf-8")
    assert load_cluster(path) == cluster


def measure_planted(num_nodes):
    """Plant costs by group: 1 ns a byte inside a node, 100 ns between nodes, 60 ns for a device alone."""
    asked, rank, world_size = [], dist.get_rank(), dist.get_world_size()

    def planted(name, group, everyone, device, **how):
        members = None if group is None else dist.get_process_group_ranks(group)
        asked.append((name, members))
        per_node = world_size // num_nodes
        inside = members is not None and members[-1] // per_node == members[0] // per_node
        if name == "all_to_all":
            everyone_sends = members is not None and len(members) == 4
            assert how["prepare"].keywords["num_near"] == (per_node - 1 if everyone_sends else 0)
        cost = LinkCost(1e-5, 1e-9) if inside else LinkCost(1e-4, 1e-7)
        # The idle devices of a node only take part in the reduction over ranks.
        is_alone = len(asked) == 7 and num_nodes > 1 < per_node
        cost = LinkCost(1e-4, 6e-8) if is_alone else cost
        return LinkFit(cost, 0.99, 0.02)

    cluster_profiler.measure_collective = planted
    cluster_profiler.expert_flops_per_s = lambda *_: 1e9 + rank
    cluster_profiler.attention_flops_per_s = lambda *_: 2e9 - rank
    return measure_cluster(SETTINGS, num_nodes, CPU, world_size, print), asked


@on_plain_ranks(4)
def test_a_node_s_nics_are_measured_with_all_its_devices():
    cluster, asked = measure_planted(2)
    node, place = divmod(dist.get_rank(), 2)
    assert asked[0] == ("point_to_point", [2 * node, 2 * node + 1])
    assert asked[6] == ("point_to_point", [0, 2] if place == 0 else None)  # one device alone
    assert asked[7] == ("point_to_point", [place, place + 2])  # all at once
    assert asked[8] == ("all_to_all", [0, 1, 2, 3])
    assert cluster.intra_node.bandwidth_bytes_per_s == pytest.approx(1e9)
    assert cluster.inter_node.bandwidth_bytes_per_s == pytest.approx(2e7), "both devices' shares"
    assert cluster.inter_node.alpha_s == 1e-4
    assert cluster.inter_device.bandwidth_bytes_per_s == pytest.approx(1e9 / 60)
    between = cluster.collectives["all_to_all"]["inter_node"]
    assert between.bandwidth_bytes_per_s == pytest.approx(1e7), "of one device"
    assert between.alpha_s == pytest.approx(1e-4 / 6), "of one of the layer's all-to-alls"
    assert (between.r_squared, between.worst_relative_error) == (0.99, 0.02)
    assert cluster.expert_flops_per_s == 1e9, "that of the slowest"
    assert cluster.non_expert_flops_per_s == 2e9 - 3
    assert "all devices of a node at once" in cluster.sources["inter_node"]


@on_plain_ranks(2)
def test_a_missing_class_of_links_takes_the_costs_of_the_other():
    for num_nodes, kind, missing in ((1, "intra_node", "inter_node"), (2, "inter_node", "intra_node")):
        cluster, _ = measure_planted(num_nodes)
        assert cluster.intra_node == cluster.inter_node == cluster.inter_device
        assert all(list(classes) == [kind] for classes in cluster.collectives.values())
        assert f"same as {kind}" in cluster.sources[missing]


def test_message_sizes_grow_fourfold_and_end_with_the_largest():
    assert SETTINGS.message_bytes() == [1 << 10, 1 << 12, 1 << 14]
    assert replace(SETTINGS, most_bytes=5000).message_bytes() == [1 << 10, 1 << 12, 5000]
