"""Which device owns each expert, and on which devices its parameters are present.

Shape letters: E experts, D devices.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.arrays import frozen_array


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """Owners and replicas of one layer's experts during one iteration.

    Attributes:
        owner_E: Device that keeps the parameters and the optimizer state of each expert, int64 ``[E]``.
        present_ED: Whether each expert is present on each device, true at the owner; bool ``[E, D]``.

    Raises:
        ValueError: An array has a wrong shape or data type, or an owner is out of range or lacks its expert.
    """

    owner_E: np.ndarray
    present_ED: np.ndarray

    def __post_init__(self) -> None:
        owner, present = np.asarray(self.owner_E), np.asarray(self.present_ED)
        is_wrong = owner.ndim != 1 or present.ndim != 2 or len(owner) != len(present) or not present.size
        if is_wrong or owner.dtype.kind not in "iu" or present.dtype.kind not in "biu":
            raise ValueError(
                f"placement: got owner_E of shape {owner.shape} and dtype {owner.dtype}, and present_ED of "
                f"shape {present.shape} and dtype {present.dtype}: wanted one integer device number for each "
                "of at least one expert, (E,), and bool (E, D)"
            )
        object.__setattr__(self, "owner_E", frozen_array(owner, np.int64))
        object.__setattr__(self, "present_ED", frozen_array(present, np.bool_))
        is_wrong_E = (self.owner_E < 0) | (self.owner_E >= self.num_devices)
        if is_wrong_E.any():
            expert = int(is_wrong_E.argmax())
            raise ValueError(
                f"expert {expert} is owned by device {int(self.owner_E[expert])}: wanted a device from 0 to "
                f"{self.num_devices - 1}"
            )
        at_owner_E = self.present_ED[np.arange(self.num_experts), self.owner_E]
        if not at_owner_E.all():
            expert = int(at_owner_E.argmin())
            raise ValueError(
                f"expert {expert} is not present on its owner, device {int(self.owner_E[expert])}: wanted "
                "present_ED[e, owner_E[e]] to be true for every expert"
            )

    @classmethod
    def owners_only(cls, owner_E: np.ndarray, num_devices: int) -> "ExpertPlacement":
        """The placement of plain expert parallelism: each expert only on its owner (integers ``[E]``)."""
        owner = np.asarray(owner_E)
        return cls(owner, owner[..., None] == np.arange(num_devices))

    @property
    def num_experts(self) -> int:
        """Number of experts, E."""
        return int(self.present_ED.shape[0])

    @property
    def num_devices(self) -> int:
        """Number of devices, D."""
        return int(self.present_ED.shape[1])

    @cached_property
    def owned_per_device_D(self) -> np.ndarray:
        """Number of experts that each device owns, int64 ``[D]``."""
        return frozen_array(np.bincount(self.owner_E, minlength=self.num_devices), np.int64)

    @cached_property
    def replicas_per_device_D(self) -> np.ndarray:
        """Number of replicas that each device holds, int64 ``[D]``."""
        present_D = self.present_ED.view(np.uint8).sum(axis=0, dtype=np.int64)
        return frozen_array(present_D - self.owned_per_device_D, np.int64)

    @cached_property
    def num_replicas(self) -> int:
        """Number of replicas on all devices together."""
        return int(np.count_nonzero(self.present_ED)) - self.num_experts

    @cached_property
    def holder_lists(self) -> tuple[np.ndarray, np.ndarray]:
        """For kernels: where the holders of each expert begin, and the end; the holders, by expert."""
        num_E = self.present_ED.view(np.uint8).sum(axis=1, dtype=np.int64)
        first_E, holder_P = [0, *np.cumsum(num_E)], np.nonzero(self.present_ED)[1]
        return frozen_array(first_E, np.int64), frozen_array(holder_P, np.int64)

    def holders(self, expert: int) -> tuple[int, ...]:
        """The devices on which an expert is present (owner and replicas), ascending."""
        return tuple(np.flatnonzero(self.present_ED[expert]).tolist())

    def experts_on(self, device: int) -> tuple[int, ...]:
        """The experts that are present on a device, owned ones and replicas, ascending."""
        return tuple(np.flatnonzero(self.present_ED[:, device]).tolist())

    def digest(self) -> bytes:
        """A 16-byte hash of owners and presence, equal on all ranks."""
        shape = np.array(self.present_ED.shape, dtype="<i8").tobytes()
        owners = self.owner_E.astype("<i8").tobytes()
        presence = np.packbits(self.present_ED).tobytes()
        return hashlib.blake2b(shape + owners + presence, digest_size=16).digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExpertPlacement):
            return NotImplemented
        same_owners = np.array_equal(self.owner_E, other.owner_E)
        return same_owners and np.array_equal(self.present_ED, other.present_ED)

    def __hash__(self) -> int:
        return hash(self.digest())


def even_owners(num_experts: int, num_devices: int) -> np.ndarray:
    """Megatron's owners, with which a training starts: expert e on device ``floor(e D / E)``, int64 ``[E]``.

    Megatron does not support fewer experts than devices. Other experts must be a multiple of the devices.
    """
    if num_devices < 1 or num_experts < 1 or (num_experts > num_devices and num_experts % num_devices):
        raise ValueError(
            f"{num_experts} experts cannot be shared evenly by {num_devices} devices: wanted a number of "
            "experts that is a positive multiple of the number of devices, or fewer experts than devices; "
            "give owner_E explicitly instead"
        )
    return np.arange(num_experts, dtype=np.int64) * num_devices // num_experts
