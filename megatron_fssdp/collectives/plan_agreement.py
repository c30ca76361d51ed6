"""Checks that ranks, each of which plans alone, made the same plan."""

import hashlib
from collections import Counter

import torch.distributed as dist

from megatron_fssdp.collectives.all_ranks import of_all_ranks


def check_agreement(digest: bytes, group: dist.ProcessGroup, subject: str) -> None:
    """Compare the digests of all ranks of the group, each of which must call it.

    Raises:
        RuntimeError: The digests differ. The message names ``subject`` and the ranks whose digest differs
            from the most common one.
    """
    world_size, digests = group.size(), of_all_ranks(hashlib.blake2b(digest, digest_size=16).digest(), group)
    # Among equally common digests, Counter returns the one that it saw first: the lowest rank's.
    common, count = Counter(digests).most_common(1)[0]
    if count < world_size:
        differing = [rank for rank, hashed in enumerate(digests) if hashed != common]
        listing = ", ".join(f"{rank}: {hashed.hex()[:8]}" for rank, hashed in enumerate(digests))
        raise RuntimeError(
            f"[fssdp] {subject} is not the same on all {world_size} ranks: ranks {differing} differ from the "
            f"others (this is rank {group.rank()}; hashes by rank: {listing}). A plan must depend "
            "only on data that all ranks share; look for loads, settings or random numbers that differ "
            "between ranks"
        )
