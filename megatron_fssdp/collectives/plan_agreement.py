"""Checks of ranks, each of which plans alone: that they made the same plan, and that all can do something."""

import hashlib
from collections import Counter

import torch.distributed as dist


def check_agreement(digest: bytes, group: dist.ProcessGroup, what: str) -> None:
    """Raise an error on every rank of the group if the ranks' digests are not all equal.

    Args:
        digest: Hash of the data that should be equal on all ranks; any length.
        group: Process group of the ranks to compare; all of them must call this function.
        what: Name of the compared data for the error message, for example "placement of layer 3".

    Raises:
        RuntimeError: The digests differ. The message names ``what`` and the ranks whose digest differs from
            the most common one. If several digests are equally common, the one of the lowest rank counts.
    """
    world_size = group.size()
    digests = [b""] * world_size
    dist.all_gather_object(digests, hashlib.blake2b(digest, digest_size=16).digest(), group=group)
    # Among equally common digests, Counter returns the one that it saw first: the lowest rank's.
    common, count = Counter(digests).most_common(1)[0]
    if count < world_size:
        differing = [rank for rank, other in enumerate(digests) if other != common]
        listing = ", ".join(f"{rank}: {other.hex()[:8]}" for rank, other in enumerate(digests))
        raise RuntimeError(
            f"[fssdp] {what} is not the same on all {world_size} ranks: ranks {differing} differ from the "
            f"others (this is rank {group.rank()}; hashes by rank: {listing}). A plan must depend "
            "only on data that all ranks share; look for loads, settings or random numbers that differ "
            "between ranks"
        )
