"""Classes of tensors with functions of their own know the attributes that a virtual device replaces."""

import torch
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

from devtools.virtual_cuda import virtual_cuda
from megatron_fssdp.testing import run_ranks


def _devices(rank, world_size):
    with virtual_cuda():
        shard = torch.zeros(2, 2, device="cuda")
        whole = init_from_local_shards([Shard.from_tensor_and_offsets(shard, [0, 0], rank)], 2, 2)
        return whole.device.type, torch.nn.Parameter(torch.zeros(1)).device.type


def test_a_sharded_tensor_of_a_checkpoint_has_the_device_of_its_shards():
    assert run_ranks(_devices, 1) == [("cuda", "cpu")]
