import numpy as np
import torch.distributed as dist

from megatron_fssdp.collectives.plan_agreement import check_agreement
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.testing import run_ranks


def compare(rank, world_size, owners_of_rank, group_ranks):
    groups = [dist.new_group(ranks) for ranks in group_ranks]
    group = next(g for g, ranks in zip(groups, group_ranks, strict=True) if rank in ranks)
    placement = ExpertPlacement.owners_only(np.array(owners_of_rank[rank]), 2)
    try:
        check_agreement(placement.digest(), group, "placement of layer 3")
    except RuntimeError as error:
        return str(error)
    return None


def test_plans_are_compared_within_the_group_and_ties_follow_the_lowest_rank():
    messages = run_ranks(compare, 4, [[0, 1], [0, 0], [0, 1], [1, 1]], [[0, 2], [1, 3]])
    assert messages[0] is None
    assert messages[2] is None
    assert "ranks [1] differ" in messages[1]
    assert "ranks [1] differ" in messages[3]
