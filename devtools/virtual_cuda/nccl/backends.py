"""Process groups report NCCL as their backend, and are made with gloo."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from devtools.virtual_cuda.posing.patches import Patches


class Backends:
    """Knows which groups are NCCL's: all but those that were asked to be gloo's on the virtual device."""

    def __init__(self) -> None:
        self._gloo_groups: set[str] = set()
        self._of_nccl: dict[str, CoalescingBackend] = {}

    def install(self, patches: Patches) -> None:
        """Replace the functions that make groups or ask for their backend."""
        functions = {
            "get_backend": lambda group=None: "nccl" if self.is_nccl(group) else "gloo",
            "new_group": self._making(distributed_c10d.new_group),
            "init_process_group": _without_nccl(distributed_c10d.init_process_group),
            "is_nccl_available": lambda: True,
        }
        patches.put(dist, functions)
        patches.put(distributed_c10d, functions)
        device_of = distributed_c10d._get_object_coll_device
        object_device = {
            "_get_object_coll_device": lambda group=None: "cuda" if self.is_nccl(group) else device_of(group)
        }
        patches.put(distributed_c10d, object_device)

    def is_nccl(self, group: ProcessGroup | None) -> bool:
        """Whether a group is NCCL's; None stands for the group of all ranks."""
        group = group or dist.group.WORLD
        return isinstance(group, ProcessGroup) and group.group_name not in self._gloo_groups

    def of_nccl(self, group: ProcessGroup) -> "CoalescingBackend":
        """The backend of an NCCL group, always the same one."""
        return self._of_nccl.setdefault(group.group_name, CoalescingBackend())

    def _making(self, new_group: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            named = dict(zip(("ranks", "timeout", "backend", "pg_options"), args, strict=False)) | kwargs
            is_gloo = str(named.get("backend")).lower() == "gloo"
            group = _without_nccl(new_group)(**named)
            if is_gloo and isinstance(group, ProcessGroup):
                self._gloo_groups.add(group.group_name)
            return group

        return make


class CoalescingBackend:
    """What torch asks the backend of an NCCL group for."""

    supports_coalescing = True
    supports_time_estimate = False


def _without_nccl(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes process groups, with gloo in place of NCCL and without NCCL's options."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if value == "nccl" else value for value in args)
        if "nccl" in str(kwargs.get("backend")):
            kwargs["backend"] = "gloo"
        for option in ("pg_options", "device_id"):
            kwargs.pop(option, None)
        return make(*args, **kwargs)

    return call
