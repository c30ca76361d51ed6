"""Which holder of an expert gets which of a source's tokens: by a share table, exact shares, or intervals.

On CUDA, Triton computes the remap. It comes with torch's CUDA wheels. Without it, and on the CPU, torch does.

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
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.slot_tables import SlotTable
from megatron_fssdp.runtime.slots.remap.exact_shares import Holders, exact_ends_ED, remap_exactly
from megatron_fssdp.runtime.slots.remap.reference import (
    by_number,
    remap_by_intervals,
    remap_by_table,
    sent_to,
)

logger = logging.getLogger(__name__)

_RUNS = 5  # the first one is slow
_LAST_END = 2**31 - 1

Gather = Callable[[Tensor], Tensor]
"""Brings together the counts of a source's tokens by expert, ``[E]``, of all devices: ``[D, E]``."""


@dataclass(frozen=True, eq=False)
class ShareTable:
    """A share table of ``planning/slot_tables.py`` on a device. ``numbers`` are those of :meth:`packed`."""

    numbers: Tensor
    num_slots: int
    num_experts: int

    @staticmethod
    def packed(table_JE: np.ndarray, slots: SlotTable) -> Tensor:
        """The expert of each slot, then the table: int64 on the host, so that one copy sends both."""
        return torch.from_numpy(
            np.concatenate([slots.expert_DU.reshape(-1), by_number(table_JE).reshape(-1)])
        )

    @traced("remap")
    def remap(
        self, routing_map: Tensor, probs: Tensor, gather: Gather, counts_W: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Turn the map, bool, and the probabilities of experts ``[T, E]`` into those of slots ``[T, W]``.

        The tokens of each slot are added to ``counts_W``, int32.
        """
        expert_W, table_EJ = self.numbers[: self.num_slots], self.numbers[self.num_slots :]
        table_EJ = table_EJ.view(self.num_experts, -1)
        if (kernels := _kernels_for(routing_map.device)) is not None:
            return kernels.remap(routing_map, probs, expert_W, table_EJ, counts_W)
        return _counted(remap_by_table(routing_map, probs, table_EJ, self.num_slots), counts_W)


@dataclass(frozen=True, eq=False)
class ExactShares:
    """Shares from the counts of the present micro-batch, as one source computes them on its device."""

    num_slots: int
    source: int
    holders: Holders | None  # for torch
    lines: tuple[Tensor, ...] = ()  # for Triton: expert_W, slot_DE, device_NG

    @classmethod
    def of(
        cls, slots: SlotTable, topology: Topology, source: int, device: torch.device | None = None
    ) -> "ExactShares":
        """The shares of a placement. The host does not wait for the device."""
        node_D = topology.node_of_device_D
        # The kernel goes along the devices of one node after another.
        if device is None or _kernels_for(device) is None or (np.diff(node_D) < 0).any():
            return cls(slots.num_slots, source, Holders.of(slots.slot_ED, node_D, source, device))
        sizes = topology.num_nodes, max(map(len, topology.devices_by_node))
        device_NG = np.full([1 << (size - 1).bit_length() for size in sizes], -1)
        for node, devices in enumerate(topology.devices_by_node):
            device_NG[node, : len(devices)] = devices
        arrays = slots.expert_DU.reshape(-1), slots.slot_ED.T, device_NG
        numbers = sent_to(torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays])), device)
        parts = zip(numbers.split([array.size for array in arrays]), arrays, strict=True)
        return cls(slots.num_slots, source, None, tuple(part.view(one.shape) for part, one in parts))

    @traced("remap")
    def remap(
        self, routing_map: Tensor, probs: Tensor, gather: Gather, counts_W: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`ShareTable.remap`. Every rank of the group must call it."""
        if self.holders is not None:
            counts_DE = gather(routing_map.sum(0))
            remapped = remap_exactly(routing_map, probs, counts_DE, self.holders, self.num_slots)
            return _counted(remapped, counts_W)
        kernels = _kernels_for(routing_map.device)
        known = lambda counts_E: self._intervals_W2(gather(counts_E))  # noqa: E731
        return kernels.remap(routing_map, probs, self.lines[0], known, counts_W)

    def seconds(self, counts_DE: Tensor) -> float:
        """Seconds in which the device computes the shares of counts, int64 ``[D, E]``."""
        holders = self.holders
        compute = self._intervals_W2 if holders is None else partial(exact_ends_ED, holders=holders)
        with torch.cuda.device_of(counts_DE):
            return min(elapsed_s(lambda: compute(counts_DE), counts_DE.device) for _ in range(_RUNS))

    def _intervals_W2(self, counts_DE: Tensor) -> Tensor:
        from megatron_fssdp.runtime.slots.remap.interval_kernel import intervals_W2

        return intervals_W2(counts_DE, self.source, *self.lines)


@dataclass(frozen=True, eq=False)
class Intervals:
    """Which of its expert's tokens each slot gets from this source, where the host knows the counts.

    ``numbers``, int64 ``[3, W]``: the expert of each slot, after how many tokens its interval begins, and its
    last token. The last slot of an expert also gets what was not counted, as with exact shares.
    """

    numbers: Tensor

    @classmethod
    def of(cls, sent_ED: np.ndarray, slots: SlotTable, device: torch.device) -> "Intervals":
        """The intervals for pairs by expert and receiving device, int64 ``[E, D]``, as many as are routed."""
        end_ED = np.cumsum(sent_ED, axis=1)
        expert_P, device_P = np.nonzero(slots.slot_ED >= 0)
        slot_P = slots.slot_ED[expert_P, device_P]
        numbers = np.zeros((3, slots.num_slots), np.int64)
        numbers[0] = slots.expert_DU.reshape(-1)
        numbers[1, slot_P] = (end_ED - sent_ED)[expert_P, device_P]
        numbers[2, slot_P] = end_ED[expert_P, device_P]
        numbers[2, slots.slot_ED.max(axis=1)] = _LAST_END
        return cls(sent_to(torch.from_numpy(numbers), device))

    @traced("remap")
    def remap(
        self, routing_map: Tensor, probs: Tensor, gather: Gather, counts_W: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`ShareTable.remap`."""
        expert_W, *interval_W = self.numbers
        if (kernels := _kernels_for(routing_map.device)) is not None:
            interval_W2 = torch.stack(interval_W, 1)
            return kernels.remap(routing_map, probs, expert_W, lambda counts_E: interval_W2, counts_W)
        return _counted(remap_by_intervals(routing_map, probs, expert_W, *interval_W), counts_W)


def seconds_of_shares(num_experts: int, topology: Topology, device: torch.device | None = None) -> float:
    """Seconds in which a device computes exact shares if each device has each of ``num_experts``."""
    slots = SlotTable(np.tile(np.arange(num_experts), (topology.num_devices, 1)))
    counts_DE = torch.ones((topology.num_devices, num_experts), dtype=torch.int64, device=device)
    return ExactShares.of(slots, topology, 0, device).seconds(counts_DE)


def _counted(remapped: tuple[Tensor, Tensor], counts_W: Tensor | None) -> tuple[Tensor, Tensor]:
    if counts_W is not None:
        counts_W.add_(remapped[0].sum(0))
    return remapped


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
            "Triton and a C compiler; torch computes the same by up to a hundred small kernels"
        )
        return None
    return kernels
