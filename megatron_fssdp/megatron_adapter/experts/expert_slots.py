"""The expert Parameters of a pipeline stage as numbered slots, and the expert that each slot holds.

Shape letters: L MoE layers of the stage, E experts of a layer, D devices of the expert-parallel group.
"""

from collections.abc import Callable
from itertools import chain

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.experts import gradient_sync
from megatron_fssdp.megatron_adapter.experts.resharding import ExpertResharding, ReshardReport
from megatron_fssdp.megatron_adapter.experts.slot_experts import SlotExperts
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ExpertParameters
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer


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
        """Register a built layer before any owner moves, and return its index in the owner map."""
        if self._owners is not None:
            raise RuntimeError(
                "MoE layer: got a layer that was built after a re-shard, wanted all layers before the first "
                "re-shard; build the whole model before training"
            )
        self.layers.append(layer)
        self._experts.append(experts)
        return len(self.layers) - 1

    @property
    def owners(self) -> OwnerMap:
        """The current owner map; at first, it is Megatron's even distribution."""
        if self._owners is not None:
            return self._owners
        context = self.layers[0].context
        return OwnerMap.even(len(self.layers), context.num_experts, context.num_devices)

    def layer_numbers(self) -> tuple[int, ...]:
        """Megatron's numbers of the stage's MoE layers, without those of multi-token prediction."""
        return tuple(layer.context.layer for layer in self.layers)

    @property
    def parameters(self) -> list[ExpertParameters]:
        """The Parameters of every slot of this rank, in the order of slots, ``L*E/D`` entries."""
        return [parameters for experts in self._experts for parameters in experts.parameters]

    def versions(self) -> list[int]:
        """How often somebody has written each Parameter of this rank's slots.

        DDP and Megatron's optimizers write buffers, of which a Parameter is a view with its own counter.
        """
        return [parameter._version for slot in self.parameters for parameter in slot]

    def adopt(self, owners: OwnerMap) -> None:
        """Tell all layers who owns which expert from now on. The slots hold these experts already."""
        slots = self.parameters
        layout = ExpertLayout.of(slots[0])
        for index, (layer, experts) in enumerate(zip(self.layers, self._experts, strict=True)):
            owned = owners.slots_on(layer.groups.device, index)
            parameters = {expert: slots[slot] for expert, slot in owned.items()}
            layer.lifecycle.own(owners.device_LE[index], parameters, layout)
            experts.share_modules(self._experts)
            gradient_sync.belong_to(layer, chain.from_iterable(parameters.values()))
        self._owners = owners

    def move_to(self, owners: OwnerMap) -> ReshardReport | None:
        """Move the experts to these owners and adopt them, see :meth:`ExpertResharding.execute`."""
        if self.resharding is None:
            raise ConfigurationError(
                "experts: got a strategy that moves no owners, or no iteration yet, wanted a strategy with "
                "reshard_interval whose training has begun"
            )
        if (report := self.resharding.execute(self.owners, owners)) is not None:
            self.adopt(owners)
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
