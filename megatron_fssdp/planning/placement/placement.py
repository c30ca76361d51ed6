"""Which device owns each expert, and on which devices its parameters are present.

Shape letters: T tokens, M model dim, F ffn dim, E experts, D devices, L layers.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.placement.array_freezing import frozen_array


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """Owners and replicas of one layer's experts during one iteration.

    Construction proves the invariants, so a placement that exists is a valid one. Two
    placements are equal when owners and presence are; ``slots`` is only a bound to prove.

    Attributes:
        owner_E: int64 [E], the device that keeps expert ``e``'s parameters and optimizer state.
        present_ED: bool [E, D], true where the parameters are present; always at the owner.
        slots: Most replicas (present experts it does not own) a device may hold; None: no bound.
    """

    owner_E: np.ndarray
    present_ED: np.ndarray
    slots: int | None = None

    def __post_init__(self) -> None:
        owner, present = np.asarray(self.owner_E), np.asarray(self.present_ED)
        if owner.ndim != 1 or owner.size == 0 or owner.dtype.kind not in "iu":
            raise ValueError(
                f"owner_E has shape {owner.shape} and dtype {owner.dtype}: wanted one integer device per "
                "expert, shape (E,) with at least one expert"
            )
        if present.ndim != 2 or present.shape[0] != owner.shape[0] or present.shape[1] == 0:
            raise ValueError(
                f"present_ED has shape {present.shape}: wanted ({owner.shape[0]}, D), one row for each of "
                f"the {owner.shape[0]} experts of owner_E and one column a device"
            )
        if present.dtype.kind not in "biu":
            raise ValueError(f"present_ED has dtype {present.dtype}: wanted bool")
        object.__setattr__(self, "owner_E", frozen_array(owner, np.int64))
        object.__setattr__(self, "present_ED", frozen_array(present, np.bool_))
        self._check_owners()
        if self.slots is not None:
            self._check_slots(self.slots)

    def _check_owners(self) -> None:
        num_experts, num_devices = self.present_ED.shape
        if int(self.owner_E.view(np.uint64).max()) >= num_devices:  # a negative one is a huge one here
            expert = int(np.flatnonzero((self.owner_E < 0) | (self.owner_E >= num_devices))[0])
            raise ValueError(
                f"expert {expert} is owned by device {int(self.owner_E[expert])}: wanted a device from 0 to "
                f"{num_devices - 1}"
            )
        at_owner_E = self.present_ED[np.arange(num_experts), self.owner_E]
        if not at_owner_E.all():
            expert = int(np.flatnonzero(~at_owner_E)[0])
            raise ValueError(
                f"expert {expert} is not present on its owner, device {int(self.owner_E[expert])}: wanted "
                "present_ED[e, owner_E[e]] to be true for every expert"
            )

    def _check_slots(self, slots: int) -> None:
        if slots < 0:
            raise ValueError(f"slots is {slots}: wanted 0 or more replicas a device")
        # Where all replicas together are no more, as without any, no device has more.
        if self.num_replicas > slots and int(self.replicas_per_device_D.max()) > slots:
            device = int(np.flatnonzero(self.replicas_per_device_D > slots)[0])
            raise ValueError(
                f"device {device} holds {int(self.replicas_per_device_D[device])} replicas: wanted at most "
                f"slots = {slots}; plan fewer replicas or raise slots"
            )

    @classmethod
    def owners_only(cls, owner_E: np.ndarray, num_devices: int) -> "ExpertPlacement":
        """Plain expert parallelism: every expert on its owner and nowhere else."""
        owner = np.asarray(owner_E)
        in_range = owner.ndim == 1 and owner.size > 0 and owner.dtype.kind in "iu"
        present_ED = np.zeros((owner.shape[0] if owner.ndim else 0, num_devices), dtype=np.bool_)
        if in_range and int(owner.min()) >= 0 and int(owner.max()) < num_devices:
            present_ED[np.arange(owner.shape[0]), owner] = True
        return cls(owner, present_ED, slots=0)

    def with_replicas(
        self, replicas: Iterable[tuple[int, int]], *, slots: int | None = None
    ) -> "ExpertPlacement":
        """A copy with more (expert, device) pairs present, within ``slots`` replicas a device."""
        present_ED = self.present_ED.copy()
        for expert, device in replicas:
            present_ED[expert, device] = True
        return ExpertPlacement(self.owner_E, present_ED, slots=slots)

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
        """int64 [D]: how many experts each device owns."""
        return frozen_array(np.bincount(self.owner_E, minlength=self.num_devices), np.int64)

    @cached_property
    def replicas_per_device_D(self) -> np.ndarray:
        """int64 [D]: how many replicas each device holds."""
        return frozen_array(np.count_nonzero(self.present_ED, axis=0) - self.owned_per_device_D, np.int64)

    @cached_property
    def num_replicas(self) -> int:
        """Number of replicas on all devices together."""
        return int(np.count_nonzero(self.present_ED)) - self.num_experts

    def holders(self, expert: int) -> tuple[int, ...]:
        """The devices on which an expert is present, ascending."""
        return tuple(np.flatnonzero(self.present_ED[expert]).tolist())

    def experts_on(self, device: int) -> tuple[int, ...]:
        """The experts present on a device, ascending."""
        return tuple(np.flatnonzero(self.present_ED[:, device]).tolist())

    def digest(self) -> bytes:
        """A stable 16-byte hash of owners and presence; equal placements agree across ranks."""
        shape = np.array(self.present_ED.shape, dtype="<i8").tobytes()
        owners = self.owner_E.astype("<i8").tobytes()
        presence = np.packbits(self.present_ED).tobytes()
        return hashlib.blake2b(shape + owners + presence, digest_size=16).digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExpertPlacement):
            return NotImplemented
        return np.array_equal(self.owner_E, other.owner_E) and np.array_equal(
            self.present_ED, other.present_ED
        )

    def __hash__(self) -> int:
        return hash(self.digest())


def even_owners(num_experts: int, num_devices: int) -> np.ndarray:
    """The owners Megatron starts with: ``owner_E[e] = e // (E / D)``, int64 [E]."""
    if num_devices < 1 or num_experts < 1 or num_experts % num_devices:
        raise ValueError(
            f"{num_experts} experts cannot be shared evenly by {num_devices} devices: wanted a number of "
            "experts that is a positive multiple of the number of devices; give owner_E explicitly instead"
        )
    return np.arange(num_experts, dtype=np.int64) // (num_experts // num_devices)
