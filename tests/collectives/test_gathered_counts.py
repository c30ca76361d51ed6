import torch
import torch.distributed as dist

from megatron_fssdp.collectives.gathered_counts import gather_counts, start_counts
from megatron_fssdp.testing import run_ranks


def gather(rank: int, world_size: int) -> None:
    """Counts of two devices with two expert-tensor-parallel peers each, see ``ExpertGroups``."""
    rows = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    columns = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    device, peer = divmod(rank, 2)
    own = torch.tensor([10 * device + peer, 7])
    wanted = torch.tensor([[[0, 7], [10, 7]], [[1, 7], [11, 7]]])
    counts_XDE = start_counts(own, rows[peer], columns[device]).wait()
    assert torch.equal(counts_XDE, wanted)
    assert torch.equal(start_counts(own, rows[peer]).wait(), wanted[peer : peer + 1])
    assert torch.equal(gather_counts(own, rows[peer]), wanted[peer])


def test_every_rank_has_the_counts_of_all_devices_and_peers() -> None:
    run_ranks(gather, 4)
