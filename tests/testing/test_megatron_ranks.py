import pytest

from megatron_fssdp.testing import RankError, run_megatron_ranks

from .test_example import expert_parallel_size


def test_a_world_size_that_does_not_match_the_layout_is_refused():
    with pytest.raises(RankError, match="change the number of ranks or the sizes"):
        run_megatron_ranks(expert_parallel_size, 2, ep=4)
