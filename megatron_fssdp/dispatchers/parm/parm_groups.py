"""The process groups of a layer under Parm's schedules, by their roles."""

from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist

from megatron_fssdp.planning.cost.tensor_schedules import Group


@dataclass(frozen=True, eq=False)
class ParmGroups:
    """Process groups of one MoE layer, seen from one rank."""

    devices: dist.ProcessGroup  # EP: expert-parallel, one rank for each of D devices
    parts: dist.ProcessGroup  # ESP: expert-tensor-parallel, the X ranks that share each expert of a device
    all_parts: dist.ProcessGroup  # EP&ESP; part x of device d is rank d * X + x
    tensor_parallel: dist.ProcessGroup  # MP, Y ranks
    are_equal: bool  # Several tensor-parallel ranks have the same tokens: without sequence parallelism.

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
