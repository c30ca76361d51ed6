"""Counts where Megatron's own routers send tokens, for the records of a run under ``none``.

Nothing of the layers changes: ``MoELayer.route`` tells a runtime of plain expert parallelism what it returns.
"""

import weakref
from collections.abc import Iterable

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_fssdp.megatron_adapter.layer.model_layers import trained_layers
from megatron_fssdp.megatron_adapter.support.megatron_settings import MegatronSettings
from megatron_fssdp.megatron_adapter.support.node_detection import detect_topology
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.runtime.experts.expert_layout import LocalExperts
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
from megatron_fssdp.strategies.ep import EpSettings
from megatron_fssdp.strategies.ep.ep_strategy import EpStrategy
from megatron_fssdp.strategies.layer_plan import LayerContext

_counted: weakref.WeakKeyDictionary[MoELayer, SlotLayer] = weakref.WeakKeyDictionary()


def count(layer: MoELayer, routing_map: torch.Tensor) -> None:
    """Count a training pass, bool ``[T, E]``. Of a recomputed layer, only the second pass has gradients."""
    if layer.training and torch.is_grad_enabled() and (counted := _counted.get(layer)) is not None:
        with torch.no_grad():
            counted.counts.open(counted.passes.plan_iteration(), routing_map)


def stock_runtime(chunks: Iterable[torch.nn.Module]) -> MoERuntime:
    """A runtime that counts the tokens of Megatron's own layers. Collective over expert-parallel ranks.

    Layers whose tokens a CUDA graph dispatches are left out: it gives Megatron no routing map.
    """
    runtime = MoERuntime(EpStrategy(EpSettings()), measure=True)
    layers = [of for chunk in chunks for of in trained_layers(chunk) if isinstance(of[0], MoELayer)]
    layers = [of for of in layers if not MegatronSettings.of(of[0].config).captures_preprocess]
    topology = detect_topology(layers[0][0].ep_group, None) if layers else None
    for layer, number, _ in layers:
        assert topology is not None
        owner_E = even_owners(layer.config.num_moe_experts, topology.num_devices)
        context = LayerContext(number, owner_E, topology)
        groups = ExpertGroups(layer.ep_group, topology, everyone=layer.token_dispatcher.tp_ep_group)
        # Megatron's experts compute; the runtime needs only to know where.
        nothing = [torch.nn.Parameter(torch.empty(0, device=next(layer.parameters()).device))]
        experts = dict.fromkeys(layer.local_expert_indices, nothing)
        _counted[layer] = runtime.add_layer(context, groups, LocalExperts("", experts))
    return runtime
