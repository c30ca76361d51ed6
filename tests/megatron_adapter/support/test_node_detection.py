import os

import pytest

from megatron_fssdp.testing import run_ranks


@pytest.mark.parametrize("num_ranks_of_nodes", [(2, 1), (1, 3), (2, 2)])
def test_all_ranks_find_the_same_nodes(num_ranks_of_nodes):
    node_of_rank = [node for node, size in enumerate(num_ranks_of_nodes) for _ in range(size)]
    found = run_ranks(nodes_found, len(node_of_rank), num_ranks_of_nodes)
    assert found == [tuple(node_of_rank)] * len(node_of_rank)


def nodes_found(rank: int, world_size: int, num_ranks_of_nodes: tuple[int, ...]) -> tuple[int, ...]:
    import torch.distributed as dist

    from megatron_fssdp.megatron_adapter.support.node_detection import detect_topology

    places = [(size, place) for size in num_ranks_of_nodes for place in range(size)]
    size, place = places[rank]
    os.environ.update(LOCAL_WORLD_SIZE=str(size), LOCAL_RANK=str(place))
    assert dist.group.WORLD is not None
    return detect_topology(dist.group.WORLD, None).node_of_device
