"""Executes a re-shard: the experts of a pipeline stage move to the slots of a new owner map.

Contents move between Megatron's Parameters, which stay registered, bucketed and optimized where
they are (Hecate §4.3, heterogeneous sharding across layers). Gradients do not move, so the time
for it is between two iterations.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.nn import Parameter

from megatron_fssdp.collectives.failure_place import naming_failures
from megatron_fssdp.collectives.plan_agreement import check_agreement
from megatron_fssdp.collectives.sparse.slot_exchange import DEFAULT_BUFFER_BYTES, exchange_slots
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.experts.expert_parameters import Parameters, expert_parameters
from megatron_fssdp.megatron_adapter.experts.slot_quantities import slot_quantities
from megatron_fssdp.planning.placement.owner_map import OwnerMap

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReshardReport:
    """What one re-shard did.

    Attributes:
        experts_moved: Experts of the pipeline stage whose slot changed.
        bytes_moved: Bytes of parameters and optimizer states that went to another device, all
            devices of the expert-parallel group together.
        seconds: Wall time on this rank.
    """

    experts_moved: int
    bytes_moved: int
    seconds: float


def expert_slots(model_chunks: Sequence[torch.nn.Module]) -> list[Parameters]:
    """Parameters of this rank's slots: of each MoE layer in model order, its local experts.

    Args:
        model_chunks: The model chunks of this pipeline stage.
    """
    layers = [module for chunk in model_chunks for module in chunk.modules() if isinstance(module, MoELayer)]
    return [slot for layer in layers for slot in expert_parameters(layer.experts, layer.num_local_experts)]


@dataclass(frozen=True, eq=False)
class ExpertResharding:
    """The slots of a pipeline stage and what has to be known to permute them.

    Attributes:
        slots: This rank's slots in order; a slot is all Parameters of one expert.
        expert_parallel: The ranks that share the experts; device ``d`` of a map is rank ``d`` of it.
        expert_data_parallel: The ranks that hold the same experts as this one and share their
            optimizer states.
        model_chunks: DDP's chunks of the model on this rank.
        optimizer: Megatron's optimizer.
        buffer_bytes: Memory that a re-shard may take for its buffers.
    """

    slots: Sequence[Sequence[Parameter]]
    expert_parallel: dist.ProcessGroup
    expert_data_parallel: dist.ProcessGroup
    model_chunks: Sequence[Any]
    optimizer: Any
    buffer_bytes: int = DEFAULT_BUFFER_BYTES

    @torch.no_grad()
    def execute(self, old: OwnerMap, new: OwnerMap) -> ReshardReport:
        """Move all parameters, masters and optimizer states from where ``old`` has them to ``new``.

        All ranks of the pipeline stage's experts have to call it, between two iterations: after the
        optimizer's step, before the next forward pass.

        Args:
            old: Where the experts are.
            new: Where they shall be.

        Raises:
            ValueError: A map is not for these slots.
            RuntimeError: The ranks do not have the same maps.
            ConfigurationError: The slots are not interchangeable, or an optimizer keeps what cannot be
                moved. Nothing has moved in any of these cases.
        """
        self._check(old, "old")
        self._check(new, "new")
        self._agree(old, new)
        moves = old.moves_to(new)
        if not moves:
            return ReshardReport(0, 0, 0.0)
        started_s = synchronized_s(self.slots[0][0].device)
        quantities = slot_quantities(
            self.slots,
            self.optimizer,
            expert_parallel=self.expert_parallel,
            expert_data_parallel=self.expert_data_parallel,
        )
        finish_parameter_gathers(self.model_chunks)
        with naming_failures("a re-shard"):
            exchange_slots(self.expert_parallel, moves, quantities, buffer_bytes=self.buffer_bytes)
        slot_bytes = sum(quantity.num_elements * quantity.dtype.itemsize for quantity in quantities)
        leaving = sum(move.source_device != move.device for move in moves)
        report = ReshardReport(
            len(moves), leaving * slot_bytes, synchronized_s(self.slots[0][0].device) - started_s
        )
        if self.expert_parallel.rank() == 0 and self.expert_data_parallel.rank() == 0:
            logger.warning(
                f"[fssdp] re-sharded {report.experts_moved} of {new.device_LE.size} experts of this pipeline "
                f"stage: {report.bytes_moved / 1e6:.1f} MB to other devices in {report.seconds:.3f} s"
            )
        return report

    def _check(self, owner_map: OwnerMap, what: str) -> None:
        got = (owner_map.num_devices, owner_map.slots_per_device)
        wanted = (self.expert_parallel.size(), len(self.slots))
        if got != wanted or wanted[0] == 1:
            raise ValueError(
                f"{what} owner map: got {got[0]} devices of {got[1]} slots, wanted {wanted[0]} devices of "
                f"{wanted[1]} slots, as the expert-parallel group has, and more than one device"
            )

    def _agree(self, old: OwnerMap, new: OwnerMap) -> None:
        digest = old.digest() + new.digest() + self.buffer_bytes.to_bytes(8, "little")
        agree_on(digest, "the owner map of a re-shard", self.expert_parallel, self.expert_data_parallel)


def agree_on(
    digest: bytes, what: str, expert_parallel: dist.ProcessGroup, expert_data_parallel: dist.ProcessGroup
) -> None:
    """Raise everywhere unless all ranks of both groups have the same digest.

    Args:
        digest: Of what all have to agree on.
        what: Names it in the error.
        expert_parallel: The ranks that share the experts.
        expert_data_parallel: The ranks that hold the same experts as this one.

    Raises:
        RuntimeError: They have not.
    """
    disagreement = None
    try:
        check_agreement(digest, expert_parallel, what)
    except RuntimeError as error:
        # Ranks of the other group may agree among themselves and wait in the second check.
        disagreement, digest = error, b"disagreement"
    check_agreement(digest, expert_data_parallel, what)
    if disagreement is not None:
        raise disagreement


def synchronized_s(device: torch.device) -> float:
    """Now, in seconds, with the device's work done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def finish_parameter_gathers(model_chunks: Sequence[Any]) -> None:
    """Complete the experts' parameters where DDP overlaps their all-gather with the forward pass.

    Until then only the optimizer's own part of a Parameter has the last step's update. A group that
    is finished here is not gathered again by the forward pre-hooks before the next gradient
    reduction; schedules that start all gathers once more find the same parameters on all ranks.

    Args:
        model_chunks: DDP's chunks of the model on this rank.

    Raises:
        ConfigurationError: Gathers start during the optimizer step, before the experts' own.
    """
    for chunk in model_chunks:
        # In the first iteration, and in evaluation, the hooks are off and the parameters complete.
        if not getattr(chunk, "remove_forward_pre_hook_handles", None):
            continue
        if chunk.overlap_param_gather_with_optimizer_step:
            raise ConfigurationError(
                "re-sharding: got --overlap-param-gather-with-optimizer-step, which starts to gather experts "
                "before they are updated; wanted --overlap-param-gather alone: drop the flag"
            )
        for bucket_group in chunk.expert_parallel_bucket_groups:
            # The next group has its own turn in this loop.
            bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)
