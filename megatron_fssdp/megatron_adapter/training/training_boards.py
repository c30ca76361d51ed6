"""Writes what happens in MoE layers to the boards that Megatron uses: TensorBoard and Weights & Biases.

Megatron opens both on its last global rank. This module opens no board. It writes nothing if the user did not
request a board from Megatron.

Shape letters: E experts, D devices.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

from megatron_fssdp.reporting.records.run_records import IterationMetrics, LayerMetrics
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
    """Send an iteration from global rank 0 to the last rank, and write it there. All ranks call it.

    Args:
        metrics: Metrics of the iteration on global rank 0; ``None`` on other ranks.
        loads: Loads of the layers on global rank 0; empty on other ranks.
    """
    last = dist.get_world_size() - 1
    entry = None if metrics is None else (metrics, [load.counts_DE.sum(axis=0) for load in loads])
    if last > 0:
        if dist.get_rank() == 0:
            dist.send_object_list([entry], dst=last)
        elif dist.get_rank() == last:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=0)
            entry = received[0]
    if dist.get_rank() == last and entry is not None:
        _write(*entry)


def board_scalars(metrics: IterationMetrics) -> dict[str, float]:
    """Return every scalar of an iteration by its name on a board.

    Args:
        metrics: Metrics of the iteration.
    """
    layers = metrics.layers
    scalars = {f"fssdp/{name}": float(getattr(metrics, key)) for key, name in _ITERATION_SCALARS.items()}
    if layers:
        scalars["fssdp/seconds waiting for spAG"] = sum(layer.spag_exposed_s for layer in layers)
        scalars["fssdp/seconds waiting for spRS"] = sum(layer.sprs_exposed_s for layer in layers)
        loads = [layer.load_max_over_mean for layer in layers]
        scalars["fssdp/device load, max over mean, mean of layers"] = sum(loads) / len(loads)
    for layer in layers:
        scalars |= {
            f"fssdp {name}/layer {layer.layer}": float(getattr(layer, key))
            for key, name in _LAYER_SCALARS.items()
        }
    return scalars


def _write(metrics: IterationMetrics, load_of_layer_E: Sequence[np.ndarray]) -> None:
    scalars, step = board_scalars(metrics), metrics.iteration
    histograms = {
        _histogram_name(layer): load_E for layer, load_E in zip(metrics.layers, load_of_layer_E, strict=True)
    }
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is not None:
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, step)
        for name, load_E in histograms.items():
            tensorboard.add_histogram(name, load_E, step)
    if wandb is not None:
        wandb.log({**scalars, **{name: wandb.Histogram(load_E) for name, load_E in histograms.items()}}, step)


def _histogram_name(layer: LayerMetrics) -> str:
    return f"fssdp tokens of an expert/layer {layer.layer}"
