import os

import torch.distributed as dist

from megatron_fssdp.megatron_adapter.support.node_detection import detect_topology
from tests.support.training_preload import on_ranks


@on_ranks(4)
def test_all_ranks_find_the_same_nodes():
    for sizes in ((3, 1), (1, 3), (2, 2)):
        places = [(size, place) for size in sizes for place in range(size)]
        size, place = places[dist.get_rank()]
        os.environ.update(LOCAL_WORLD_SIZE=str(size), LOCAL_RANK=str(place))
        wanted = tuple(node for node, size in enumerate(sizes) for _ in range(size))
        assert detect_topology(dist.group.WORLD, None).node_of_device == wanted
