import pytest

from megatron_fssdp.testing import RankError, run_megatron_ranks


def describe_layout(rank, world_size):
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    total = torch.tensor([rank])
    dist.all_reduce(total, group=parallel_state.get_expert_model_parallel_group())
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "ep_total": int(total),
        "rng": sorted(get_cuda_rng_tracker().get_states()),
    }


def test_parallel_state_follows_the_arguments():
    flat = run_megatron_ranks(describe_layout, 4, ep=4)
    assert [(r["dp"], r["ep"], r["ep_total"]) for r in flat] == [(4, 4, 6)] * 4
    assert all("expert-parallel-rng" in r["rng"] for r in flat)
    mixed = run_megatron_ranks(describe_layout, 4, pp=2, ep=2, vpp=2)
    assert [(r["pp"], r["dp"], r["ep"], r["vpp"]) for r in mixed] == [(2, 2, 2, 2)] * 4
    assert [r["ep_total"] for r in mixed] == [1, 1, 5, 5]


def test_a_world_size_that_does_not_match_the_layout_is_refused():
    with pytest.raises(RankError, match="change the number of ranks or the sizes"):
        run_megatron_ranks(describe_layout, 2, ep=4)
