import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.megatron_adapter.diagnosis.exchange_probe import prepare_exchange
from tests.support.training_preload import on_ranks


@on_ranks(4)
def test_every_rank_sends_the_stated_bytes_to_the_ranks_that_count():
    for num_near in (0, 1):
        check_exchange(num_near)


def check_exchange(num_near):
    group, device, original = dist.group.WORLD, torch.device("cpu"), dist.all_to_all_single
    with warnings.catch_warnings(action="error"):  # each rank would print those of Megatron
        call, sent_bytes = prepare_exchange(4000, group, device, num_near, model_dim=8, dtype=torch.float32)
    rows = dict.fromkeys(range(4), 0)  # elements that each rank gets

    def counted(output, input, output_split_sizes=None, input_split_sizes=None, group=None, **more):
        if input.dim() == 2:
            for peer, number in enumerate(input_split_sizes):
                rows[peer] += int(number) * input.shape[1]
        return original(output, input, output_split_sizes, input_split_sizes, group, **more)

    with mock.patch.object(dist, "all_to_all_single", counted):
        call()
    assert 4 * rows[(dist.get_rank() + 1) % 4] * (3 - num_near) == sent_bytes
    assert len(set(rows.values())) == 1
    assert sent_bytes == pytest.approx(4 * 4000, rel=0.1)
