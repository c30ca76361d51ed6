"""A check that ranks which plan alone have come to the same plan."""

import hashlib
from collections import Counter

import torch
import torch.distributed as dist

_DIGEST_BYTES = 16


def check_agreement(digest: bytes, group: dist.ProcessGroup, what: str) -> None:
    """Raise on every rank of the group when the ranks' digests are not all equal.

    Args:
        digest: A hash of what should be equal; any length.
        group: The ranks that compare; all must call this.
        what: Names the compared thing in the message, for example "placement of layer 3".

    Raises:
        RuntimeError: Names ``what`` and the ranks whose digest differs from the most common
            one; on a tie the one of the lowest rank counts as common.
    """
    world_size = dist.get_world_size(group)
    own = hashlib.blake2b(digest, digest_size=_DIGEST_BYTES).digest()
    device = _device_of(group)
    gathered = torch.empty(world_size * _DIGEST_BYTES, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(
        gathered, torch.tensor(list(own), dtype=torch.uint8, device=device), group=group
    )
    digests = [bytes(row) for row in gathered.view(world_size, -1).tolist()]
    common, count = Counter(digests).most_common(1)[0]  # of equals, the first seen: the lowest rank
    if count < world_size:
        differing = [rank for rank, other in enumerate(digests) if other != common]
        listing = ", ".join(f"{rank}: {other.hex()[:8]}" for rank, other in enumerate(digests))
        raise RuntimeError(
            f"[fssdp] {what} is not the same on all {world_size} ranks: ranks {differing} differ from the "
            f"others (this is rank {dist.get_rank(group)}; hashes by rank: {listing}). Planning must depend "
            "only on what all ranks share; look for unsynchronised loads, settings or random numbers"
        )


def _device_of(group: dist.ProcessGroup) -> torch.device:
    backend = dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
