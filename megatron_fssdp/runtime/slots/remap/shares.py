"""Which holder of an expert gets which of a source's tokens: by a share table, or by intervals of numbers.

On CUDA, Triton computes the remap. It comes with torch's CUDA wheels. Without it, and on the CPU, torch does.

Exact shares are intervals that follow from the counts of the present micro-batch. Kernels of Triton find them
on the device (``interval_kernel.py``), and the host waits for nothing. Without Triton, the planner finds
them: CPU ranks have the counts on the host anyway, and the host of a CUDA device waits for them.

Shape letters: T tokens, E experts, D devices, J rows of a share table, W slots of all devices, P pairs of
expert and device.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_fssdp.collectives.device_clock import elapsed_s
from megatron_fssdp.collectives.trace_names import traced
from megatron_fssdp.planning.dispatch.token_dispatch import plan_dispatch
from megatron_fssdp.planning.dispatch.whole_tokens import whole_tokens
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.slot_tables import SlotTable
from megatron_fssdp.runtime.slots.remap import reference
from megatron_fssdp.runtime.slots.remap.reference import by_number, sent_to

logger = logging.getLogger(__name__)

_RUNS = 5  # the first one is slow
_LAST_END = 2**31 - 1

Count = Callable[[], Tensor]
"""Counts a source's tokens of each expert: int64 ``[E]``."""


@dataclass(frozen=True, eq=False)
class Shares:
    """The remap of one source, on its device.

    ``expert_W``, int64, has the expert of each slot, -1 without one. ``known`` is a share table ``[E, J]``
    (:func:`by_number`), or finds intervals ``[W, 2]`` (:func:`remap_by_intervals`) by a :data:`Count`.
    """

    expert_W: Tensor
    known: Tensor | Callable[[Count], Tensor]

    @classmethod
    def by_table(cls, table_JE: np.ndarray, slots: SlotTable, send: Callable[[Tensor], Tensor]) -> "Shares":
        """Shares by a table of ``planning/slot_tables.py``; ``send`` brings a tensor to the device."""
        return cls(*_sent(send, slots.expert_DU.reshape(-1), by_number(table_JE)))

    @classmethod
    def by_intervals(cls, sent_ED: np.ndarray, slots: SlotTable, device: torch.device) -> "Shares":
        """Shares for pairs by expert and receiving device, int64 ``[E, D]``, as many as are routed.

        The last slot of an expert also gets what was not counted.
        """
        send = partial(sent_to, device=device)
        expert_W, interval_W2 = _sent(send, slots.expert_DU.reshape(-1), _intervals_W2(sent_ED, slots))
        return cls(expert_W, lambda count: interval_W2)

    @classmethod
    def exact(
        cls,
        slots: SlotTable,
        placement: ExpertPlacement,
        topology: Topology,
        source: int,
        device: torch.device,
        gather: Callable[[Tensor], Tensor],
    ) -> "Shares":
        """Shares from the counts of the present micro-batch.

        ``gather``, of all ranks, brings together the counts of a source's tokens by expert, int64 ``[E]``, of
        all devices: ``[D, E]``.
        """
        send, of_slots = partial(sent_to, device=device), slots.expert_DU.reshape(-1)

        def planned(count: Count) -> Tensor:
            counts_DE = gather(count()).cpu().numpy()
            quotas_ED = plan_dispatch("exact", counts_DE, placement, topology).whole_tokens_ED
            sent_ED = whole_tokens(counts_DE, quotas_ED, topology, source).sent_ED
            return send(torch.from_numpy(_intervals_W2(sent_ED, slots)))

        if _kernels_for(device) is None:
            return cls(send(torch.from_numpy(of_slots.copy())), planned)
        sizes = topology.num_nodes, max(map(len, topology.devices_by_node))
        device_NG = np.full([1 << (size - 1).bit_length() for size in sizes], -1)
        for node, devices in enumerate(topology.devices_by_node):
            device_NG[node, : len(devices)] = devices
        expert_W, *places = _sent(send, of_slots, slots.slot_ED.T, device_NG)

        def computed(count: Count) -> Tensor:
            from megatron_fssdp.runtime.slots.remap.interval_kernel import intervals_W2

            return intervals_W2(gather(count()), source, expert_W, *places)

        return cls(expert_W, computed)

    @traced("remap")
    def remap(
        self, routing_map: Tensor, probs: Tensor, counts_W: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Turn the map, bool, and the probabilities of experts ``[T, E]`` into those of slots ``[T, W]``.

        The tokens of each slot are added to ``counts_W``, int32.
        """
        compute = _kernels_for(routing_map.device) or reference
        remapped: tuple[Tensor, Tensor] = compute.remap(
            routing_map, probs, self.expert_W, self.known, counts_W
        )
        return remapped


def _sent(send: Callable[[Tensor], Tensor], *arrays: np.ndarray) -> list[Tensor]:
    """Arrays of int64 on the device, by one copy."""
    numbers = send(torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays])))
    parts = numbers.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _intervals_W2(sent_ED: np.ndarray, slots: SlotTable) -> np.ndarray:
    """After how many tokens of its expert each slot's interval begins, and its last token; int64 ``[W, 2]``.

    An expert's last slot has no end, so that it also gets what was not counted.
    """
    end_ED = np.cumsum(sent_ED, axis=1)
    expert_P, device_P = np.nonzero(slots.slot_ED >= 0)
    slot_P = slots.slot_ED[expert_P, device_P]
    interval_W2 = np.zeros((slots.num_slots, 2), np.int64)
    interval_W2[slot_P, 0] = (end_ED - sent_ED)[expert_P, device_P]
    interval_W2[slot_P, 1] = end_ED[expert_P, device_P]
    interval_W2[slots.slot_ED.max(axis=1), 1] = _LAST_END
    return interval_W2


def seconds_of_shares(num_experts: int, topology: Topology, device: torch.device | None = None) -> float:
    """Seconds in which a device computes exact shares if each device has each of ``num_experts``."""
    device, num_devices = device or torch.device("cpu"), topology.num_devices
    slots = SlotTable(np.tile(np.arange(num_experts), (num_devices, 1)))
    everywhere = ExpertPlacement(
        np.zeros(num_experts, np.int64), np.ones((num_experts, num_devices), np.bool_)
    )
    counts_DE = torch.ones((num_devices, num_experts), dtype=torch.int64, device=device)
    known: Any = Shares.exact(slots, everywhere, topology, 0, device, lambda counts_E: counts_DE).known
    with torch.cuda.device_of(counts_DE):
        return min(elapsed_s(lambda: known(list), device) for _ in range(_RUNS))


def _kernels_for(device: torch.device) -> Any:
    return _kernels() if device.type == "cuda" else None


@cache
def _kernels() -> Any:
    try:
        from megatron_fssdp.runtime.slots.remap import kernels

        # Triton compiles what launches a kernel, for which it needs a C compiler.
        numbers = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
        kernels.remap(numbers.bool(), numbers.float(), numbers[0], numbers[:1].t(), None)
    except Exception as error:
        logger.warning(
            f"[fssdp] remap: got no kernels of Triton ({type(error).__name__}: {str(error)[:80]!r}), wanted "
            "Triton and a C compiler; torch remaps by many small kernels, and the host waits for exact shares"
        )
        return None
    return kernels
