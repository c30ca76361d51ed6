"""The expert Parameters of a pipeline stage as numbered slots, the experts that they hold, and their moves.

Only the contents of Megatron's Parameters move: experts to the slots of a new owner map, or copies of them to
resident slots. The Parameters themselves stay registered with their modules, DDP buckets and optimizer groups
(Hecate §4.3, heterogeneous sharding across layers). Gradients do not move, so contents move between two
iterations.

Shape letters: L MoE layers of the stage, E experts of a layer, D devices of the expert-parallel group.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.all_ranks import check_agreement
from megatron_fssdp.collectives.device_clock import synchronized_s
from megatron_fssdp.collectives.messages import naming_failures
from megatron_fssdp.collectives.sparse import slot_exchange
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter import KEEP_OWNERS
from megatron_fssdp.megatron_adapter.experts import gradient_sync
from megatron_fssdp.megatron_adapter.experts.slot_experts import SlotExperts
from megatron_fssdp.megatron_adapter.experts.slot_quantities import slot_quantities
from megatron_fssdp.planning.placement.owner_map import OwnerMap, SlotMove
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer

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

    Raises:
        ConfigurationError: The slots are not interchangeable, or an optimizer keeps a state that cannot be
            moved. The constructor says it, too.
    """

    slots: Sequence[ExpertParameters]  # of this rank, in order
    expert_parallel: dist.ProcessGroup  # its ranks are the devices of owner maps
    expert_data_parallel: dist.ProcessGroup  # ranks with the same experts, which share optimizer states
    model_chunks: Sequence[Any]  # of this rank, wrapped in Megatron's DDP
    optimizer: Any

    def __post_init__(self) -> None:
        self.quantities()  # A run whose slots cannot be exchanged should fail now.

    def quantities(self) -> list[slot_exchange.SlotQuantity]:
        """What the slots exchange: see :func:`slot_quantities`."""
        groups = self.expert_parallel, self.expert_data_parallel
        return slot_quantities(self.slots, self.optimizer, *groups)

    @torch.no_grad()
    def move(self, moves: Sequence[SlotMove], operation: str, *, are_copies: bool = False) -> ReshardReport:
        """Permute contents of slots, equally on all ranks; source slots keep contents that ``are_copies``.

        ``operation`` names it at errors.
        """
        started_s = synchronized_s()
        quantities = self.quantities()
        _finish_parameter_gathers(self.model_chunks)
        with naming_failures(operation):
            slot_exchange.exchange_slots(self.expert_parallel, moves, quantities, are_copies=are_copies)
        slot_bytes = sum(quantity.num_elements * quantity.dtype.itemsize for quantity in quantities)
        leaving = sum(move.source_device != move.device for move in moves)
        return ReshardReport(len(moves), leaving * slot_bytes, synchronized_s() - started_s)


class ExpertSlots:
    """Slots of this rank: numbered places that each hold one expert of the pipeline stage.

    A slot is an index over the Parameters that Megatron registered. Slots are numbered layer by layer, in the
    order in which the layers were built, over all model chunks of this rank. The :class:`OwnerMap` says which
    expert is in which slot. Two layers, four experts and two devices, after a re-shard (``layer.expert``)::

        Parameters of    |  layer 0  |  layer 1  |
        slot             |  0  |  1  |  2  |  3  |
        device 0 holds   | 0.0 | 0.1 | 0.2 | 1.3 |   three experts of layer 0
        device 1 holds   | 1.0 | 0.3 | 1.2 | 1.1 |   one expert of layer 0

    """

    def __init__(self) -> None:
        self.layers: list[SlotLayer] = []  # all layers of the owner map
        self.resharding: ExpertResharding | None = None  # set if the strategy moves owners
        # Of the checkpoint that was loaded, or of before a save, until owners move there.
        self.saved_owners: OwnerMap | None = None
        # Before experts go home, which may refuse; and when experts have moved.
        self.before_home: Callable[[], None] = lambda: None
        self.on_move: Callable[[], None] = lambda: None
        self._experts: list[SlotExperts] = []
        self._owners: OwnerMap | None = None

    def add_layer(self, layer: SlotLayer, experts: SlotExperts) -> int:
        """Register a layer before any owner moves, and return its index in the owner map.

        Raises:
            ConfigurationError: It has other experts than the layers before, and the strategy moves experts.
        """
        strategy, context = layer.local.strategy, layer.local.context
        wanted = self.layers[0].local.context.num_experts if self.layers else context.num_experts
        moves = context.num_devices > 1 and (strategy.moves_owners or strategy.resident_slots)
        if moves and context.num_experts != wanted:
            raise ConfigurationError(
                f"re-sharding or resident replicas: got layers of {wanted} and {context.num_experts} "
                f"experts, wanted equally many in all layers; {KEEP_OWNERS}, or another --moe-strategy"
            )
        if moves and self._experts and experts.places.kind != self._experts[0].places.kind:
            raise ConfigurationError(
                "re-sharding or resident replicas: got layers whose experts have different LoRA adapters or "
                f"frozen parts, wanted the same in all layers; {KEEP_OWNERS}, or another --moe-strategy"
            )
        self.layers.append(layer)
        self._experts.append(experts)
        return len(self.layers) - 1

    @property
    def owners(self) -> OwnerMap:
        """The current owner map; at first, it is Megatron's even distribution."""
        if self._owners is not None:
            return self._owners
        context = self.layers[0].local.context
        return OwnerMap.even(len(self.layers), context.num_experts, context.num_devices)

    def layer_numbers(self) -> tuple[int, ...]:
        """Megatron's numbers of the stage's MoE layers, without those of multi-token prediction."""
        return tuple(layer.local.context.layer for layer in self.layers)

    @property
    def parameters(self) -> list[ExpertParameters]:
        """The Parameters of every slot of this rank, in the order of slots, ``L*E/D`` entries."""
        return [parameters for experts in self._experts for parameters in experts.parameters]

    def versions(self) -> list[int]:
        """How often somebody has written each Parameter of this rank's slots.

        DDP and Megatron's optimizers write buffers, of which a Parameter is a view with its own counter.
        """
        return [parameter._version for slot in self.parameters for parameter in slot]

    def trained(self) -> set[tuple[bool, ...]]:
        """Which Parameters of an expert are trained, not frozen; several if this rank's slots differ."""
        return {tuple(parameter.requires_grad for parameter in slot) for slot in self.parameters}

    def move_to(self, owners: OwnerMap) -> ReshardReport | None:
        """Move the experts to these owners, and return what moved; ``None`` if nothing has. Collective.

        Raises:
            ValueError: The owner map does not fit these slots.
            RuntimeError: The ranks got different owner maps.
            ConfigurationError: As of :class:`ExpertResharding`, or the strategy moves no owners.
        """
        if (resharding := self.resharding) is None:
            raise ConfigurationError(
                "experts: got a strategy that moves no owners, or no iteration yet, wanted a strategy with "
                "reshard_interval whose training has begun"
            )
        wanted = (resharding.expert_parallel.size(), len(resharding.slots))
        if (got := (owners.num_devices, owners.slots_per_device)) != wanted:
            raise ValueError(
                f"new owner map: got {got[0]} devices with {got[1]} slots each, wanted {wanted[0]} devices "
                f"with {wanted[1]} slots each; make it from the present one, by OwnerMap.with_owners"
            )
        old = self.owners
        groups = resharding.expert_parallel, resharding.expert_data_parallel
        check_agreement(old.digest() + owners.digest(), "the owner map of a re-shard", *groups)
        if not (moves := old.moves_to(owners)):
            return None
        report = resharding.move(moves, "a re-shard")
        if resharding.expert_parallel.rank() == 0 and resharding.expert_data_parallel.rank() == 0:
            logger.info(
                f"[fssdp] re-sharded {report.experts_moved} of {owners.device_LE.size} experts of this "
                f"pipeline stage: {report.bytes_moved / 1e6:.1f} MB to other devices "
                f"in {report.seconds:.3f} s"
            )
        slots = self.parameters
        for index, (layer, experts) in enumerate(zip(self.layers, self._experts, strict=True)):
            owned = owners.slots_on(layer.groups.device, index)
            parameters = {expert: slots[slot] for expert, slot in owned.items()}
            layer.own(owners.device_LE[index], parameters)
            experts.share_modules(self._experts)
            gradient_sync.belong_to(layer, chain.from_iterable(parameters.values()))
        self._owners = owners
        self.on_move()
        return report

    def go_home(self) -> bool:
        """Move all experts back to where Megatron's names mean them; return whether any moved. Collective.

        The order lasts until the strategy's next re-shard. It is for the time between two iterations.
        """
        if not self.layers or (owners := self.owners).is_even:
            return False
        self.before_home()
        even = OwnerMap.even(owners.num_layers, owners.num_experts, owners.num_devices)
        return self.move_to(even) is not None

    def move_to_saved(self) -> None:
        """Move the experts to ``saved_owners``, if there are some and this strategy moves owners."""
        saved, self.saved_owners = self.saved_owners, None
        if saved is not None and self.resharding is not None:
            self.move_to(saved)

    def await_parameters(self, layer: int) -> None:
        """Finish the gathers of parameters that DDP overlaps, for the slots with experts of a layer."""
        registered_in = {layer}
        if self._owners is not None:
            per_layer = self._owners.slots_per_device // len(self.layers)
            slots = self._owners.slots_on(self.layers[layer].groups.device, layer).values()
            registered_in = {slot // per_layer for slot in slots}
        for index in sorted(registered_in):
            gradient_sync.await_parameters(self._experts[index].module)


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
