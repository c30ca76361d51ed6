"""Writes what happens in MoE layers to the boards that Megatron uses: TensorBoard and Weights & Biases.

Megatron opens both on its last global rank, if the user requests them.

Shape letters: E experts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

from megatron_fssdp.records.metrics import IterationMetrics
from megatron_fssdp.runtime.layers.layer_load import LayerLoad

_LAYER_SCALARS = {
    "load_max_over_mean": "device load, max over mean",
    "ep_load_max_over_mean": "device load under plain EP, max over mean",
    "num_replicas": "replicas",
    "spag_bytes": "spAG bytes",
    "sprs_bytes": "spRS bytes",
    "cross_node_tokens": "tokens to another node",
}
_ITERATION_SCALARS = {
    "iteration_s": "seconds",
    "passes_s": "seconds of passes",
    "reshard_s": "seconds of re-sharding",
    "tokens_per_s": "tokens per second",
}


def boards_are_asked_for() -> bool:
    """Whether the command line requests a board from Megatron; equal on all ranks."""
    args = get_args()
    return bool(getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", ""))


def write_to_boards(metrics: IterationMetrics | None, loads: Sequence[LayerLoad]) -> None:
    """Send an iteration's metrics and loads from global rank 0, which alone has them, to the last rank.

    The last rank writes them. All ranks call this function.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    entry: list[Any] = [metrics and (metrics, [load.counts_DE.sum(axis=0) for load in loads])]
    if last > 0 and rank == 0:
        dist.send_object_list(entry, dst=last)
    elif last > 0 and rank == last:
        dist.recv_object_list(entry, src=0)
    if rank == last and entry[0] is not None:
        _write(*entry[0])


def _write(metrics: IterationMetrics, load_of_layer_E: Sequence[np.ndarray]) -> None:
    layers, step = metrics.layers, metrics.iteration
    scalars = {f"fssdp/{name}": float(getattr(metrics, key)) for key, name in _ITERATION_SCALARS.items()}
    if layers:
        scalars["fssdp/seconds waiting for spAG"] = sum(layer.spag_exposed_s for layer in layers)
        scalars["fssdp/seconds waiting for spRS"] = sum(layer.sprs_exposed_s for layer in layers)
        loads = [layer.load_max_over_mean for layer in layers]
        scalars["fssdp/device load, max over mean, mean of layers"] = sum(loads) / len(loads)
    for layer in layers:
        for key, name in _LAYER_SCALARS.items():
            scalars[f"fssdp {name}/layer {layer.layer}"] = float(getattr(layer, key))
    histograms = {
        f"fssdp tokens of an expert/layer {layer.layer}": load_E
        for layer, load_E in zip(layers, load_of_layer_E, strict=True)
    }
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is not None:
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, step)
        for name, load_E in histograms.items():
            tensorboard.add_histogram(name, load_E, step)
    if wandb is not None:
        wandb.log({**scalars, **{name: wandb.Histogram(load_E) for name, load_E in histograms.items()}}, step)
