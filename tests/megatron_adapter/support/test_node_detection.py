import os

import torch.distributed as dist

from megatron_fssdp.megatron_adapter.support.node_detection import detect_topology, ranks_of_node
from tests.support.training_preload import on_ranks


@on_ranks(4)
def test_all_ranks_find_the_same_nodes():
    for sizes in ((3, 1), (1, 3), (2, 2)):
        places = [(size, place) for size in sizes for place in range(size)]
        size, place = places[dist.get_rank()]
        os.environ.update(LOCAL_WORLD_SIZE=str(size), LOCAL_RANK=str(place))
        wanted = tuple(node for node, size in enumerate(sizes) for _ in range(size))
        assert detect_topology(dist.group.WORLD, None).node_of_device == wanted


@on_ranks(2)
def test_ray_workers_of_verl_share_a_node_although_each_calls_itself_alone():
    os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0", RAY_LOCAL_WORLD_SIZE="2")
    assert detect_topology(dist.group.WORLD, None).node_of_device == (0, 0)
    assert ranks_of_node(unknown=4) == 2
