"""The CPU runtime is requested or detected, and stays off in a GPU run. All trainings of the tests use it."""

from argparse import Namespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch.utils.checkpoint import checkpoint

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.cpu import cpu_runtime
from megatron_fssdp.megatron_adapter.cpu.cpu_replacements import all_gather_in_one_hop, all_to_all_at_once
from megatron_fssdp.megatron_adapter.experts.expert_places import expert_parameters
from tests.support.training_preload import on_layer_ranks, on_plain_ranks, run_megatron_ranks

from ..layer.small_config import build_layer, moe_config


def test_the_device_variable_selects_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not cpu_runtime.requested()
    monkeypatch.setenv(cpu_runtime.DEVICE_VARIABLE, "cpu")
    assert cpu_runtime.requested()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(cpu_runtime.DEVICE_VARIABLE)
    assert cpu_runtime.requested()
    monkeypatch.setenv(cpu_runtime.DEVICE_VARIABLE, "tpu")
    with pytest.raises(ConfigurationError, match="'tpu'"):
        cpu_runtime.requested()


def test_nothing_is_replaced_in_a_gpu_run(monkeypatch):
    monkeypatch.setenv(cpu_runtime.DEVICE_VARIABLE, "cuda")
    with pytest.raises(ConfigurationError, match="torch finds no CUDA device"):
        cpu_runtime.install()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = dict(vars(torch.cuda))
    assert not cpu_runtime.install()
    assert vars(torch.cuda) == before
    assert torch.zeros(1).type() == "torch.FloatTensor"
    cpu_runtime.check_arguments(Namespace(context_parallel_size=2))


@on_layer_ranks(1)
def test_a_recomputed_pass_is_on_the_cpu_too():
    made = torch.ones(1, requires_grad=True)
    checkpoint(lambda x: x.to(device=torch.cuda.current_device()) ** 2, made, use_reentrant=False).backward()
    assert made.grad.item() == 2


@on_plain_ranks(3)
def test_messages_take_one_hop_and_are_posted_at_once():
    rank = dist.get_rank()
    ring, direct = dist.all_gather_into_tensor, dist.all_to_all_single
    for width, dtype in ((1, torch.bool), (256, torch.int64), (257, torch.int64)):
        own_R = [torch.arange(2 * width).add(peer).view(2, width).to(dtype) for peer in range(3)]
        gathered = own_R[0].new_empty(2 * 3, width)
        with mock.patch.object(dist, "all_to_all_single", side_effect=direct) as in_one_hop:
            all_gather_in_one_hop(ring, gathered, own_R[rank])
        assert torch.equal(gathered, torch.cat(own_R))
        assert in_one_hop.called == (width < 257)
    rows, uneven_RR = torch.arange(6.0).view(6, 1) + 10 * rank, np.array([[0, 4, 2], [6, 0, 0], [1, 2, 3]])
    for of_rank in ((None, None), (uneven_RR[:, rank], uneven_RR[rank])):
        stock, ours = (rows.new_zeros(6 if of_rank[0] is None else of_rank[0].sum(), 1) for _ in range(2))
        dist.all_to_all_single(stock, rows, *(None if sizes is None else sizes.tolist() for sizes in of_rank))
        all_to_all_at_once(None, ours, rows, *of_rank)
        assert torch.equal(ours, stock)


def first_weights(rank, world_size):
    """Matrices of this rank's two experts, one by one and grouped, and what the rank draws next."""
    options = {"tensor_model_parallel_size": ps.get_tensor_model_parallel_world_size()}
    options["expert_tensor_parallel_size"] = ps.get_expert_tensor_parallel_world_size()
    drawn = []
    for is_grouped in (False, True):
        torch.manual_seed(1)
        config = moe_config(2, 16, 4, moe_grouped_gemm=is_grouped, num_attention_heads=2, **options)
        experts = expert_parameters(build_layer(config, "ep", {}, stock=True).experts, 2)
        up, down = (torch.stack(matrices).detach() for matrices in zip(*experts, strict=True))
        drawn.append((up, down, torch.rand(3)))
    return drawn


def test_experts_differ_between_expert_parallel_ranks_and_nowhere_else():
    """Copies are equal, tensor-parallel parts are cut from one expert, and later layers are equal."""
    whole, cut = (run_megatron_ranks(first_weights, 4, tp=etp, etp=etp, ep=2) for etp in (1, 2))
    for of_ranks, parts in zip(zip(*whole, strict=True), zip(*cut, strict=True), strict=True):
        (up, down, drawn), (next_up, next_down, next_drawn), *copies = of_ranks
        assert not torch.isin(up, next_up).any()
        assert not torch.isin(down, next_down).any()
        assert torch.equal(drawn, next_drawn)
        for original, copy, halves in zip(of_ranks[:2], copies, (parts[:2], parts[2:]), strict=True):
            assert all(map(torch.equal, copy, original))
            for axis in (1, 2):
                assert torch.equal(torch.cat([half[axis - 1] for half in halves], axis), original[axis - 1])
