"""Reads and writes ``placements.npy`` of a run: the placement of experts and the tokens of each device.

Shape letters: I iterations, L MoE layers, E experts, D devices of all expert-parallel groups together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.records.growing_arrays import GrowingArrays, read_arrays
from megatron_fssdp.records.metrics import unreadable

PLACEMENTS_FILE = "placements.npy"

_ARRAYS = {"owned_bits": 4, "present_bits": 4, "ep_tokens_ILD": 3, "tokens_ILD": 3}
"""Numbers of dimensions. Bits of devices are packed into bytes."""


@dataclass(frozen=True, eq=False)
class RecordedPlacements:
    """Placements of a run at the end of each iteration."""

    owned_ILED: NDArray[np.bool_]  # where the device owns the expert
    present_ILED: NDArray[np.bool_]  # where the device has the expert's weights, as owner or replica
    ep_tokens_ILD: NDArray[np.int64]  # tokens that each device would compute under plain expert parallelism
    tokens_ILD: NDArray[np.int64]  # tokens that each device computed
    iterations: NDArray[np.int64]  # [I], number of each iteration, ascending
    layers: NDArray[np.int64]  # [L], Megatron's number of each recorded layer

    @property
    def most_replicas(self) -> int:
        """Number of replicas of a layer if every device had every expert."""
        num_experts, num_devices = self.present_ILED.shape[2:]
        return int(num_experts * num_devices - self.owned_ILED[0, 0].sum())


class PlacementsWriter(GrowingArrays):
    """Adds placements to ``placements.npy`` of a run."""

    def __init__(self, record_dir: Path | str, layers: Sequence[int]) -> None:
        super().__init__(Path(record_dir) / PLACEMENTS_FILE, layers, read_placements)

    def append(
        self,
        iteration: int,
        owned_LED: NDArray[np.bool_],
        present_LED: NDArray[np.bool_],
        ep_tokens_LD: NDArray[Any],
        tokens_LD: NDArray[Any],
    ) -> None:
        """Add an iteration (:class:`RecordedPlacements`). Entries from it on are dropped first."""
        bits = np.packbits(owned_LED, axis=-1), np.packbits(present_LED, axis=-1)
        tokens = np.array(ep_tokens_LD, dtype=np.int64), np.array(tokens_LD, dtype=np.int64)
        self.append_row(iteration, dict(zip(_ARRAYS, (*bits, *tokens), strict=True)))


def read_placements(record_dir: Path | str) -> RecordedPlacements:
    """Read the placements of a run, or raise a ConfigurationError; also while the run continues."""
    path = Path(record_dir) / PLACEMENTS_FILE
    arrays = read_arrays(path, _ARRAYS)
    owned, present = arrays.pop("owned_bits"), arrays.pop("present_bits")
    num_devices, problem = arrays["tokens_ILD"].shape[-1], ""
    if owned.shape != present.shape or owned.shape[-1] != -(-num_devices // 8):
        problem = (
            f"owned_bits has shape {owned.shape}, present_bits {present.shape} for {num_devices} devices"
        )
    elif arrays["ep_tokens_ILD"].shape != arrays["tokens_ILD"].shape:
        problem = "ep_tokens_ILD and tokens_ILD have different shapes"
    elif np.any(owned & ~present):
        problem = "an expert is not present on its owner"
    if problem:
        raise unreadable(path, ValueError(problem))
    owned_ILED, present_ILED = (
        np.unpackbits(bits, axis=-1, count=num_devices).astype(np.bool_) for bits in (owned, present)
    )
    return RecordedPlacements(owned_ILED, present_ILED, **arrays)
