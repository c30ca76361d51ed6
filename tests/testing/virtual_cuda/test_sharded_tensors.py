"""Classes of tensors with functions of their own know the attributes that a virtual device replaces."""

import torch
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

from devtools.virtual_cuda import virtual_cuda
from tests.support.training_preload import on_plain_ranks


@on_plain_ranks(1)
def test_a_sharded_tensor_of_a_checkpoint_has_the_device_of_its_shards():
    with virtual_cuda():
        shard = torch.zeros(2, 2, device="cuda")
        whole = init_from_local_shards([Shard.from_tensor_and_offsets(shard, [0, 0], 0)], 2, 2)
        assert whole.device.type == "cuda"
        assert torch.nn.Parameter(torch.zeros(1)).device.type == "cpu"
