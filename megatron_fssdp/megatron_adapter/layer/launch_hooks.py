"""Points of the program outside of MoE layers: a chunk's first gather, clocks, devices with one queue.

Every other layer's gather is started by the MoE layer before it. If CUDA graphs of attention bypass these
hooks, the first layer's gather starts with its dispatch instead, and nothing is lost.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer
from megatron_fssdp.megatron_adapter.wrapping import wrap
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
from megatron_fssdp.runtime.slots.autograd_points import in_backward


def install_launch_hooks(model: Iterable[torch.nn.Module]) -> None:
    """Add a forward pre-hook to the transformer layers of the model chunks that contain our MoE layers.

    If the device has one queue for the kernels of all streams, each part of attention also gets a hook, at
    which transfers issue their next messages.
    """
    for chunk in model:
        first = True
        for module in chunk.modules():
            if isinstance(module, TransformerLayer) and isinstance(module.mlp, StrategyMoELayer):
                _hook(module, module.mlp, first)
                first = False


def _hook(layer: TransformerLayer, moe: StrategyMoELayer, first: bool) -> None:
    slots = moe.slot_layer
    slots.is_first = first

    def begin(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if not is_graph_capturing():
            slots.mark(hidden, "other", None)
            if first and not in_backward():
                slots.launch(hidden)

    if layer.config.overlap_moe_expert_parallel_comm:
        # The combined schedule calls the parts of the layer and not the layer, so that its hooks do not run.
        # Attention is its first part, and the layer's forward pass begins with the same method.
        def begin_and_attend(attention: Any, *args: Any, **kwargs: Any) -> Any:
            begin(layer, args, kwargs)
            return attention(*args, **kwargs)

        wrap(layer, "_forward_attention", begin_and_attend)
    else:
        layer.register_forward_pre_hook(begin, with_kwargs=True)
    if slots.groups.one_queue:
        for part in layer.self_attention.children():
            part.register_forward_hook(partial(_advance, slots))


def _advance(slots: SlotLayer, part: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    outputs = output if isinstance(output, tuple) else (output,)
    slots.advance_transfers(next((one for one in outputs if isinstance(one, torch.Tensor)), None))
