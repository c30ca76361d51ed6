"""Writes the figures of ``metrics.jsonl`` to the boards that Megatron uses: TensorBoard, Weights & Biases.

Megatron opens both on its last global rank, if the user requests them.

Shape letters: E experts.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

from megatron_fssdp.records.metrics import IterationMetrics
from megatron_fssdp.runtime.layers.layer_load import LayerLoad


def boards_are_asked_for() -> bool:
    """Whether the command line requests a board from Megatron; equal on all ranks."""
    args = get_args()
    return bool(getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", ""))


def write_to_boards(metrics: IterationMetrics | None, loads: Sequence[LayerLoad]) -> None:
    """Send an iteration's metrics and loads from global rank 0, which alone has them, to the last rank.

    The last rank writes them: ``fssdp/KEY`` for a figure of the iteration, ``fssdp KEY/layer N`` for one of a
    layer, and the load of each expert as a histogram. All ranks call this function.
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
    step = metrics.iteration
    scalars = {f"fssdp/{key}": value for key, value in _figures(metrics).items() if key != "iteration"}
    histograms = {}
    for layer, load_E in zip(metrics.layers, load_of_layer_E, strict=True):
        place = f"layer {layer.layer}"
        figures = _figures(layer)
        scalars |= {f"fssdp {key}/{place}": value for key, value in figures.items() if key != "layer"}
        histograms[f"fssdp tokens of an expert/{place}"] = load_E
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is not None:
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, step)
        for name, load_E in histograms.items():
            tensorboard.add_histogram(name, load_E, step)
    if wandb is not None:
        wandb.log({**scalars, **{name: wandb.Histogram(load_E) for name, load_E in histograms.items()}}, step)


def _figures(record: Any) -> dict[str, float]:
    return {key: float(value) for key, value in asdict(record).items() if isinstance(value, int | float)}
