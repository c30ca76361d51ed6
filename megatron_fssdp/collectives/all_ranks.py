"""Brings what each rank knows to all of them, and checks that ranks, each of which plans alone, agree."""

import hashlib
from collections import Counter
from itertools import chain
from typing import Any

import torch.distributed as dist


def of_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of a group's ranks, by default of the whole training, on each of them. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def check_agreement(digest: bytes, subject: str, *groups: dist.ProcessGroup) -> None:
    """Compare the digests of a group's ranks, then with those of their peers in the next group. Collective.

    Raises:
        RuntimeError: The digests differ. All of these ranks raise it. It names ``subject`` and the ranks,
            counted group by group, whose digest differs from the most common one.
    """
    digests = [hashlib.blake2b(digest, digest_size=16).hexdigest()]
    for group in groups:
        digests = list(chain.from_iterable(of_all_ranks(digests, group)))
    # Among equally common digests, Counter returns the one that it saw first: the lowest rank's.
    common, count = Counter(digests).most_common(1)[0]
    if count < len(digests):
        differing = [rank for rank, known in enumerate(digests) if known != common]
        listing = ", ".join(f"{rank}: {known[:8]}" for rank, known in enumerate(digests))
        raise RuntimeError(
            f"[fssdp] {subject} is not the same on all {len(digests)} ranks: ranks {differing} differ from "
            f"the others (hashes by rank: {listing}). A plan must depend only on data that all ranks share; "
            "look for loads, settings or random numbers that differ between ranks"
        )
