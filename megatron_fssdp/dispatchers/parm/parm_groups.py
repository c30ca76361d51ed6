"""The process groups of a layer under Parm's schedules, by their roles."""

from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist

from megatron_fssdp.planning.cost.tensor_schedules import Group


@dataclass(frozen=True, eq=False)
class ParmGroups:
    """Process groups of one MoE layer, seen from one rank.

    Attributes:
        devices: Expert-parallel group, with one rank for each of D devices (EP).
        parts: Expert-tensor-parallel group: the X ranks that share each expert of a device (ESP).
        all_parts: All parts of all devices (EP&ESP); part x of device d is rank ``d * X + x``.
        tensor_parallel: Tensor-parallel group of Y ranks (MP).
        are_equal: Whether the tensor-parallel ranks are several and have the same tokens, which is so without
            sequence parallelism.
    """

    devices: dist.ProcessGroup
    parts: dist.ProcessGroup
    all_parts: dist.ProcessGroup
    tensor_parallel: dist.ProcessGroup
    are_equal: bool

    @classmethod
    def of(cls, config: Any, pg_collection: Any) -> Self:
        """The groups among Megatron's: ``ep``, ``expt_tp``, ``tp_ep`` and ``tp`` of ``pg_collection``."""
        pg = pg_collection
        are_equal = pg.tp.size() > 1 and not config.sequence_parallel
        return cls(pg.ep, pg.expt_tp, pg.tp_ep, pg.tp, are_equal)

    @property
    def by_name(self) -> dict[Group, dist.ProcessGroup]:
        """The groups of several ranks by the names of Parm's cost model; ``mp`` only if tokens are equal."""
        named: dict[Group, dist.ProcessGroup] = {"ep": self.devices, "esp": self.parts}
        named["ep_esp"] = self.all_parts
        if self.are_equal:
            named["mp"] = self.tensor_parallel
        return {name: group for name, group in named.items() if group.size() > 1}

    def devices_of_peers(self) -> list[int]:
        """Device number of each tensor-parallel rank, ``[Y]``; collective over these ranks."""
        device_Y = [0] * self.tensor_parallel.size()
        dist.all_gather_object(device_Y, self.devices.rank(), group=self.tensor_parallel)
        return device_Y
