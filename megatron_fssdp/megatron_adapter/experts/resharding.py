"""Moves the contents of slots: experts to the slots of a new owner map, or copies of them to resident slots.

Only the contents of Megatron's Parameters move. The Parameters themselves stay registered with their
modules, DDP buckets and optimizer groups (Hecate §4.3, heterogeneous sharding across layers). Gradients
do not move, so contents move between two iterations.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.failure_place import naming_failures
from megatron_fssdp.collectives.plan_agreement import check_agreement
from megatron_fssdp.collectives.sparse import slot_exchange
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.experts.slot_quantities import PartedQuantity, slot_quantities
from megatron_fssdp.planning.placement.owner_map import OwnerMap, SlotMove
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReshardReport:
    """What one re-shard moved, and how long it took."""

    experts_moved: int  # experts of the pipeline stage whose slot changed
    bytes_moved: int  # of parameters and optimizer states to other devices of the expert-parallel group
    seconds: float  # wall time on this rank


@dataclass(frozen=True, eq=False)
class ExpertResharding:
    """Moves experts between the slots of a pipeline stage.

    All ranks that hold experts of the stage must call its methods between two iterations: after the optimizer
    step and before the next forward pass. If a method raises, nothing has moved.
    """

    slots: Sequence[ExpertParameters]  # of this rank, in order
    expert_parallel: dist.ProcessGroup  # its ranks are the devices of owner maps
    expert_data_parallel: dist.ProcessGroup  # ranks with the same experts, which share optimizer states
    model_chunks: Sequence[Any]  # of this rank, wrapped in Megatron's DDP
    optimizer: Any

    def quantities(self) -> list[PartedQuantity]:
        """Check that slots can be exchanged, and return what they exchange: see :func:`slot_quantities`."""
        groups = self.expert_parallel, self.expert_data_parallel
        return slot_quantities(self.slots, self.optimizer, *groups)

    def execute(self, old: OwnerMap, new: OwnerMap) -> ReshardReport | None:
        """Move contents from the slots of ``old`` to ``new``, and return what moved; ``None`` if nothing has.

        Raises:
            ValueError: The new owner map does not fit these slots.
            RuntimeError: The ranks got different owner maps.
            ConfigurationError: The slots are not interchangeable, or an optimizer keeps a state that
                cannot be moved.
        """
        wanted = (self.expert_parallel.size(), len(self.slots))
        if (got := (new.num_devices, new.slots_per_device)) != wanted:
            raise ValueError(
                f"new owner map: got {got[0]} devices with {got[1]} slots each, wanted {wanted[0]} devices "
                f"with {wanted[1]} slots each; make it from the present one, by OwnerMap.with_owners"
            )
        self.agree_on(old.digest() + new.digest(), "the owner map of a re-shard")
        if not (moves := old.moves_to(new)):
            return None
        report = self.move(moves, "a re-shard")
        if self.expert_parallel.rank() == 0 and self.expert_data_parallel.rank() == 0:
            logger.info(
                f"[fssdp] re-sharded {report.experts_moved} of {new.device_LE.size} experts of this pipeline "
                f"stage: {report.bytes_moved / 1e6:.1f} MB to other devices in {report.seconds:.3f} s"
            )
        return report

    @torch.no_grad()
    def move(self, moves: Sequence[SlotMove], what: str, *, are_copies: bool = False) -> ReshardReport:
        """Permute contents of slots, equally on all ranks; source slots keep contents that ``are_copies``.

        ``what`` names the operation at errors, which are those of :meth:`execute`.
        """
        device = self.slots[0][0].device
        started_s = _synchronized_s(device)
        quantities = self.quantities()
        _finish_parameter_gathers(self.model_chunks)
        with naming_failures(what):
            slot_exchange.exchange_slots(self.expert_parallel, moves, quantities, are_copies=are_copies)
        slot_bytes = sum(quantity.num_elements * quantity.dtype.itemsize for quantity in quantities)
        leaving = sum(move.source_device != move.device for move in moves)
        return ReshardReport(len(moves), leaving * slot_bytes, _synchronized_s(device) - started_s)

    def agree_on(self, digest: bytes, what: str) -> None:
        """Raise a RuntimeError on all ranks of both groups unless they have the same digest of ``what``."""
        disagreement = None
        try:
            check_agreement(digest, self.expert_parallel, what)
        except RuntimeError as error:
            # The other ranks of the expert-data-parallel group may have passed the first check. They wait in
            # the second one, so this rank must take part in it, with a digest that differs from theirs.
            disagreement, digest = error, b"disagreement"
        check_agreement(digest, self.expert_data_parallel, what)
        if disagreement is not None:
            raise disagreement


def _synchronized_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _finish_parameter_gathers(model_chunks: Sequence[Any]) -> None:
    # If DDP overlaps the gather with the forward pass, only this rank's part of a Parameter has the values of
    # the last step. In the first iteration and during evaluation, DDP has no hooks, and all are complete.
    for chunk in model_chunks:
        if not getattr(chunk, "remove_forward_pre_hook_handles", None):
            continue
        if chunk.overlap_param_gather_with_optimizer_step:
            raise ConfigurationError(
                "re-sharding: got --overlap-param-gather-with-optimizer-step, which starts to gather experts "
                "before they are updated; wanted --overlap-param-gather alone; remove the flag"
            )
        for bucket_group in chunk.expert_parallel_bucket_groups:
            # The loop finishes every group, so DDP need not start the next group here.
            bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)
