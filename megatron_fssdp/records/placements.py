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
from megatron_fssdp.records.json_lines import unreadable

PLACEMENTS_FILE = "placements.npy"

_OWNED, _PRESENT = "owned_bits", "present_bits"
_EP_TOKENS, _TOKENS = "ep_tokens_ILD", "tokens_ILD"


@dataclass(frozen=True, eq=False)
class RecordedPlacements:
    """Placements of a run at the end of each iteration.

    Attributes:
        owned_ILED: bool ``[I, L, E, D]``. True where the device owns the expert.
        present_ILED: bool ``[I, L, E, D]``. True where the device has the expert's weights, as owner or
            replica.
        ep_tokens_ILD: int64 ``[I, L, D]``. Tokens that each device would compute under plain expert
            parallelism.
        tokens_ILD: int64 ``[I, L, D]``. Tokens that each device computed.
        iterations: int64 ``[I]``. Number of each iteration, ascending.
        layers: int64 ``[L]``. Megatron's number of each recorded layer.
    """

    owned_ILED: NDArray[np.bool_]
    present_ILED: NDArray[np.bool_]
    ep_tokens_ILD: NDArray[np.int64]
    tokens_ILD: NDArray[np.int64]
    iterations: NDArray[np.int64]
    layers: NDArray[np.int64]

    @property
    def most_replicas(self) -> int:
        """Number of replicas of a layer if every device had every expert."""
        num_experts, num_devices = self.present_ILED.shape[2:]
        return int(num_experts * num_devices - self.owned_ILED[0, 0].sum())


class PlacementsWriter(GrowingArrays):
    """Adds placements to ``placements.npy``, with one bit for each expert and device.

    Args:
        record_dir: Folder of the run.
        layers: Megatron's number of each recorded layer, in order.
    """

    def __init__(self, record_dir: Path | str, layers: Sequence[int]) -> None:
        path = Path(record_dir) / PLACEMENTS_FILE
        if path.exists():
            read_placements(record_dir)  # refuses a damaged file before the training
        super().__init__(path, layers)

    def append(
        self,
        iteration: int,
        owned_LED: NDArray[np.bool_],
        present_LED: NDArray[np.bool_],
        ep_tokens_LD: NDArray[Any],
        tokens_LD: NDArray[Any],
    ) -> None:
        """Add an iteration (:class:`RecordedPlacements`). Entries from it on are dropped first."""
        entry: dict[str, NDArray[Any]] = {
            _OWNED: np.packbits(owned_LED, axis=-1),
            _PRESENT: np.packbits(present_LED, axis=-1),
            _EP_TOKENS: np.array(ep_tokens_LD, dtype=np.int64),
            _TOKENS: np.array(tokens_LD, dtype=np.int64),
        }
        self.append_row(iteration, entry)


def read_placements(record_dir: Path | str) -> RecordedPlacements:
    """Read the placements of a run, also while the run continues.

    Raises:
        ConfigurationError: The file is missing or damaged, or does not hold placements.
    """
    path = Path(record_dir) / PLACEMENTS_FILE
    arrays = read_arrays(path, {_OWNED: 4, _PRESENT: 4, _EP_TOKENS: 3, _TOKENS: 3})
    bits = arrays.pop(_OWNED), arrays.pop(_PRESENT)
    num_devices = arrays[_TOKENS].shape[-1]
    try:
        if bits[0].shape != bits[1].shape or bits[0].shape[-1] != -(-num_devices // 8):
            raise ValueError(
                f"{_OWNED} has shape {bits[0].shape} and {_PRESENT} {bits[1].shape} for {num_devices} devices"
            )
        if arrays[_EP_TOKENS].shape != arrays[_TOKENS].shape:
            raise ValueError(f"{_EP_TOKENS} and {_TOKENS} have different shapes")
        owned, present = (np.unpackbits(one, axis=-1, count=num_devices).astype(np.bool_) for one in bits)
        if np.any(owned & ~present):
            raise ValueError("an expert is not present on its owner")
    except ValueError as error:
        raise unreadable(path, error) from None
    return RecordedPlacements(owned, present, **arrays)
