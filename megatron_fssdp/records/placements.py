"""Reads and writes ``placements.npy`` of a run: the placement of experts and the tokens of each device.

Shape letters: I iterations, L MoE layers, E experts, D devices of all expert-parallel groups
together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.records.array_files import ArrayFormat, read_arrays, unreadable
from megatron_fssdp.records.growing_arrays import GrowingArrays

PLACEMENTS_FILE = "placements.npy"

_OWNED, _PRESENT = "owned_bits", "present_bits"
_EP_TOKENS, _TOKENS = "ep_tokens_ILD", "tokens_ILD"
_FORMATS = {
    _OWNED: ArrayFormat(np.uint8, 4),
    _PRESENT: ArrayFormat(np.uint8, 4),
    _EP_TOKENS: ArrayFormat(np.int64, 3),
    _TOKENS: ArrayFormat(np.int64, 3),
}


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

    def __post_init__(self) -> None:
        lead, shape = (len(self.iterations), len(self.layers)), self.present_ILED.shape
        if len(shape) != 4 or shape[:2] != lead or self.owned_ILED.shape != shape:
            raise ValueError(
                f"owned_ILED has shape {self.owned_ILED.shape} and present_ILED {shape}, "
                f"wanted {lead} + (E, D) for both, as iterations and layers say"
            )
        for name, tokens_ILD in ((_EP_TOKENS, self.ep_tokens_ILD), (_TOKENS, self.tokens_ILD)):
            if tokens_ILD.shape != (*lead, shape[3]) or np.any(tokens_ILD < 0):
                raise ValueError(
                    f"{name} has shape {tokens_ILD.shape} or negative numbers, wanted {(*lead, shape[3])}"
                )
        if np.any(self.owned_ILED & ~self.present_ILED):
            raise ValueError("an expert is not present on its owner")

    @property
    def most_replicas(self) -> int:
        """Number of replicas of a layer if every device had every expert."""
        num_experts, num_devices = self.present_ILED.shape[2:]
        return int(num_experts * num_devices - self.owned_ILED[0, 0].sum())


class PlacementsWriter:
    """Adds placements to ``placements.npy``, with one bit for each expert and device.

    Args:
        record_dir: Folder of the run. A resumed run continues the file.
        layers: Megatron's number of each recorded layer, in order.
    """

    def __init__(self, record_dir: Path | str, layers: Sequence[int]) -> None:
        path = Path(record_dir) / PLACEMENTS_FILE
        found = _read_checked(path)[0] if path.exists() else None
        self._arrays = GrowingArrays(path, np.asarray(layers, dtype=np.int64), found)

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
        self._arrays.append(iteration, entry)

    def close(self) -> None:
        """Close the file."""
        self._arrays.close()


def read_placements(record_dir: Path | str) -> RecordedPlacements:
    """Read the placements of a run, without pickle, also while the run continues.

    Raises:
        ConfigurationError: The file is missing or damaged, or does not hold placements.
    """
    return _read_checked(Path(record_dir) / PLACEMENTS_FILE)[1]


def _read_checked(path: Path) -> tuple[dict[str, NDArray[Any]], RecordedPlacements]:
    """Return the arrays of the file as they are stored, and the placements that they describe."""
    arrays = read_arrays(path, _FORMATS)
    num_devices = arrays[_TOKENS].shape[-1]
    try:
        bits = {name: arrays[name] for name in (_OWNED, _PRESENT)}
        for name, array in bits.items():
            if array.shape[-1] != -(-num_devices // 8):
                raise ValueError(f"{name} has {array.shape[-1]} bytes for {num_devices} devices")
        owned_ILED, present_ILED = (
            np.unpackbits(one, axis=-1, count=num_devices).astype(np.bool_) for one in bits.values()
        )
        placements = RecordedPlacements(
            owned_ILED,
            present_ILED,
            **{name: array for name, array in arrays.items() if name not in bits},
        )
    except ValueError as error:
        raise unreadable(path, error) from None
    return arrays, placements
