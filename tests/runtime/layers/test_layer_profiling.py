"""All ranks get the same profile: the slowest compute and links, and the least time that hides transfers."""

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.planning.cost.cost_model import LinkCost
from megatron_fssdp.planning.cost.link_seconds import LinkSet
from megatron_fssdp.planning.memory import HeldReplicas
from megatron_fssdp.planning.replica_life import PipelineStage, ReplicaLife
from megatron_fssdp.runtime.clocks.layer_stopwatch import LayerStopwatch
from megatron_fssdp.runtime.layers import layer_profiling
from tests.support.training_preload import on_layer_ranks

from ..case_run import CaseRun
from ..layer_case import FFN_DIM, MODEL_DIM, LayerCase

EXPERT_ELEMENTS = 2 * MODEL_DIM * FFN_DIM
BEFORE_S = ((0.5, 0.25), (0.75, 0.125))  # of each rank, its layers
EXPERTS_S = (1.5, 0.5)
ROWS = (300, 400)
LINKS = (((1e-3, 4e-9), (2e-3, 8e-9), (4e-3, 6e-8)), ((3e-3, 2e-9), (1e-3, 9e-9), (5e-3, 5e-8)))
FREE_BYTES = (7_000, 3_334)
NUM_MICRO_BATCHES = 4


def watch(before_s, experts_s, num_rows):
    return LayerStopwatch(num_rows, [(0.0, before_s)], [(1.0, 1.0 + experts_s)])


# Slots in 2,667 bytes, for experts of 240 bytes.
SLOTS = {
    ReplicaLife.LAYER_PASS: 5,  # one layer's parameters, one layer's gradients
    ReplicaLife.ITERATION: 2,  # two layers' parameters, one layer's gradients, two layers' sums
    ReplicaLife.MICRO_BATCH: 1,  # two layers' parameters of three micro-batches, one layer's gradients
}


def profiled(num_rows, life=ReplicaLife.ITERATION):
    """The profile of both layers, on the first of three stages."""
    rank = dist.get_rank()
    layer_profiling.measure_links = lambda *_: LinkSet(*(LinkCost(*link) for link in LINKS[rank]))
    run = CaseRun(LayerCase("profiled", num_layers=2, num_nodes=1, dtype=torch.float32))
    layers = run.runtime.layers
    for layer, before_s in zip(layers, BEFORE_S[rank], strict=True):
        layer.local.stopwatch = watch(before_s, EXPERTS_S[rank] / len(layers), num_rows[rank] // len(layers))
    layer_profiling.profile_layers(
        layers,
        [dist.group.WORLD],
        free_bytes=FREE_BYTES[rank],
        token_bytes=4 * MODEL_DIM,
        owned_bytes=1234,
        num_micro_batches=NUM_MICRO_BATCHES,
        held=HeldReplicas(life, PipelineStage((2,), num_stages=3), EXPERT_ELEMENTS, 4, NUM_MICRO_BATCHES),
    )
    assert all(layer.local.stopwatch is None for layer in layers)
    profile, of_second = (layer.local.context.profile for layer in layers)
    assert profile == of_second
    return profile


@on_layer_ranks(2)
def test_all_ranks_and_layers_get_the_same_profile():
    for life in SLOTS:
        profile, of_ranks = profiled(ROWS, life), [None, None]
        dist.all_gather_object(of_ranks, profile)
        assert of_ranks == [profile, profile]
        check_profile(life, profile)


def check_profile(life, profile):
    cluster, flops_per_token = profile.cluster, 2.0 * EXPERT_ELEMENTS
    assert profile.non_moe_s == 0.125
    assert profile.flops_per_token == flops_per_token
    # Rank 0 takes 5 ms a row, rank 1 1.25 ms.
    assert cluster.expert_flops_per_s == pytest.approx(flops_per_token * 300 / 1.5)
    assert cluster.intra == LinkCost(3e-3, 4e-9)
    assert cluster.inter == LinkCost(2e-3, 9e-9)
    assert cluster.inter_device == LinkCost(5e-3, 6e-8)
    assert profile.links == LinkSet(cluster.intra, cluster.inter, cluster.inter_device)
    assert profile.expert_bytes == 4 * EXPERT_ELEMENTS
    assert profile.token_bytes == 4 * MODEL_DIM
    assert profile.owned_bytes == 1234
    assert profile.memory_capacity == SLOTS[life]


@on_layer_ranks(2)
def test_ranks_without_rows_do_not_count_in_the_throughput():
    of_one_rank, none = (profiled(rows).cluster.expert_flops_per_s for rows in ((0, 400), (0, 0)))
    assert of_one_rank == pytest.approx(2.0 * EXPERT_ELEMENTS * 400 / 0.5)
    assert none == 1e15
