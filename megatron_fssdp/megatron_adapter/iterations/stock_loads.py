"""Counts where Megatron's own routers send tokens, for the records of a run under ``none``.

Nothing of the layers changes: routing maps are added up where ``MoELayer.route`` returns them.

Shape letters: T tokens, D devices, E experts, N numbers of a rank, S ranks, X expert-tensor-parallel peers.
"""

import weakref
from collections.abc import Iterable

import numpy as np
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_fssdp.collectives.gathered_counts import CountsOnTheWay, start_counts
from megatron_fssdp.megatron_adapter.layer.moe_layer import global_number, trained_layers
from megatron_fssdp.megatron_adapter.support.megatron_settings import MegatronSettings
from megatron_fssdp.megatron_adapter.support.node_detection import detect_topology
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.runtime.layers.slot_counts import TokenSpread
from megatron_fssdp.strategies.layer_plan import LayerContext


class _StockLayer:
    """The counts of one layer in an iteration: tokens by expert, and by how many places compute them."""

    def __init__(self, context: LayerContext, device: torch.device) -> None:
        self.context, self.spread = context, TokenSpread(context.owner_E, context.topology, device)
        self.counts_E = torch.zeros(context.num_experts, dtype=torch.int32, device=device)

    def add(self, routing_map: torch.Tensor) -> None:
        """Add the tokens of a pass, bool ``[T, E]``; the host does not wait."""
        self.counts_E.add_(routing_map.sum(dim=0))
        self.spread.add(routing_map)

    def numbers_N(self) -> torch.Tensor:
        """What other ranks need of this rank, int32."""
        return torch.cat([self.counts_E, self.spread.sums.int()])

    def load(self, numbers_DN: np.ndarray) -> LayerLoad:
        """Return the load of the iteration by the numbers of all devices."""
        context = self.context
        load, owner_E = LayerLoad.empty(context), context.owner_E
        load.counts_DE += numbers_DN[:, : context.num_experts]
        load.add_plain(load.counts_DE, owner_E, numbers_DN[:, context.num_experts :].sum(axis=0))
        node_D = context.topology.node_of_device_D
        crossing = int(load.counts_DE[node_D[:, None] != node_D[owner_E]].sum())
        load.add_tokens(ExpertPlacement.owners_only(owner_E, context.num_devices), load.owner_D, crossing)
        return load


_layers: weakref.WeakKeyDictionary[MoELayer, _StockLayer] = weakref.WeakKeyDictionary()


def count(layer: MoELayer, routing_map: torch.Tensor) -> None:
    """Count a training pass, ``[T, E]``. Of a recomputed layer, only the second pass has gradients."""
    if layer.training and torch.is_grad_enabled() and (counted := _layers.get(layer)) is not None:
        with torch.no_grad():
            counted.add(routing_map)


class StockLoads:
    """The counts of a model's layers. To make them is collective over the layers' expert-parallel ranks.

    Layers whose tokens a CUDA graph dispatches are left out: it gives Megatron no routing map.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module]) -> None:
        layers = [pair for chunk in chunks for pair in trained_layers(chunk) if isinstance(pair[0], MoELayer)]
        layers = [pair for pair in layers if not MegatronSettings.of(pair[0].config).captures_preprocess]
        self._counted: list[_StockLayer] = []
        self._on_the_way: CountsOnTheWay | None = None
        if not layers:
            return
        topology = detect_topology(layers[0][0].ep_group, None)
        self._group = layers[0][0].token_dispatcher.tp_ep_group
        for layer, before in layers:
            owner_E = even_owners(layer.config.num_moe_experts, topology.num_devices)
            context = LayerContext(global_number(layer, before), owner_E, topology)
            _layers[layer] = _StockLayer(context, next(layer.parameters()).device)
            self._counted.append(_layers[layer])

    def clear(self) -> None:
        """Forget the counts, at the begin of an iteration."""
        for counted in self._counted:
            torch._foreach_zero_([counted.counts_E, counted.spread.sums])

    def share(self) -> None:
        """Start to gather the counts of the iteration. Collective over all ranks that have the experts."""
        if self._counted:
            self._on_the_way = start_counts(
                torch.cat([counted.numbers_N() for counted in self._counted]), self._group
            )

    def take(self) -> list[LayerLoad]:
        """Return what each layer did, in their order."""
        on_the_way, self._on_the_way = self._on_the_way, None
        if on_the_way is None:
            return []
        numbers_SN = on_the_way.wait()[0].numpy()
        num_devices = self._counted[0].context.num_devices
        numbers_DN = numbers_SN.reshape(num_devices, -1, numbers_SN.shape[1]).sum(axis=1, dtype=np.int64)
        ends = np.cumsum([len(counted.counts_E) + len(counted.spread.sums) for counted in self._counted])
        parts = np.split(numbers_DN, ends[:-1], axis=1)
        return [counted.load(part_DN) for counted, part_DN in zip(self._counted, parts, strict=True)]
