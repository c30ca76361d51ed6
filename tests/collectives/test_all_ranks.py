from contextlib import nullcontext

import numpy as np
import pytest
import torch.distributed as dist

from megatron_fssdp.collectives.all_ranks import check_agreement
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from tests.support.training_preload import on_plain_ranks


@on_plain_ranks(4)
def test_plans_are_compared_within_the_group_and_ties_follow_the_lowest_rank():
    rank = dist.get_rank()
    group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    owners = np.array([[0, 1], [0, 0], [0, 1], [1, 1]][rank])
    differs = pytest.raises(RuntimeError, match=r"ranks \[1\] differ")
    with differs if rank % 2 else nullcontext():
        check_agreement(ExpertPlacement.owners_only(owners, 2).digest(), "placement of layer 3", group)
