"""Reads the loads that somebody names: of a run, of Megatron's traces, or counts in a file of one's own.

Shape letters: I iterations, Z micro-batches, L MoE layers, D devices, E experts.
"""

import csv
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.records.loads import LOADS_FILE, RecordedLoads, read_loads
from megatron_fssdp.records.rank_traces import ROUTER_TRACES, TOKENS_PER_EXPERT, RoutedModel, read_rank_traces

_COLUMNS = ("iteration", "layer", "device", "expert", "tokens")
_MOST = 2**31 - 1
_SHAPES = "[iterations, layers, experts], [I, L, devices, E] or [I, micro-batches, L, D, E]"

MICRO_BATCH_COUNTS = "counts_IZLDE"
"""The counts of micro-batches in an ``.npz`` file, such as those of ``benchmarks/recordings``."""


def sources_in(path: Path) -> list[str]:
    """Return what a path has loads of: the pattern of files in a folder, or the ending of a file."""
    if path.is_file():
        return [path.suffix]
    folder, _, files = TOKENS_PER_EXPERT.partition("/")
    patterns = [LOADS_FILE, ROUTER_TRACES, TOKENS_PER_EXPERT, *([files] if path.name == folder else [])]
    return [pattern for pattern in patterns if next(path.glob(pattern), None)]


def read_any_loads(path: Path, model: RoutedModel, most: int | None = None) -> tuple[RecordedLoads, str]:
    """Read the loads of a folder or file, and say how they were read, if that is a question.

    Of traces, only the first ``most`` iterations are read if it is given.

    Raises:
        ConfigurationError: The path has no loads or several kinds, or they are damaged or of another model.
    """
    sources = sources_in(path)
    if len(sources) > 1:
        both = " and ".join(sources)
        raise ConfigurationError(f"{path}: has {both}, wanted one of them; move them to other folders")
    if not sources:
        return read_loads(path), ""
    if sources == [LOADS_FILE]:  # Somebody's own array may have this name.
        return _read_array(path / LOADS_FILE), ""
    if path.is_dir():
        loads, note = read_rank_traces(path, sources[0], model, most)
        return loads, f"{'router traces' if sources[0] == ROUTER_TRACES else 'tokens per expert'} {note}"
    if sources in ([".npy"], [".npz"]):
        return _read_array(path), ""
    if sources == [".csv"]:
        return _read_table(path, model.num_experts), ""
    raise ConfigurationError(f"{path}: is another file, wanted .npy, .npz or .csv, or the folder of traces")


def _read_array(path: Path) -> RecordedLoads:
    """Read ``[I, L, E]``, ``[I, L, D, E]`` or ``[I, Z, L, D, E]``, or the rows of a run's file.

    An ``.npz`` file has the last of them as :data:`MICRO_BATCH_COUNTS`. Micro-batches keep their axis.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path) as file:
                if MICRO_BATCH_COUNTS not in file:
                    raise ValueError(f"got arrays {', '.join(file)}, wanted {MICRO_BATCH_COUNTS}")
                counts: NDArray[Any] = file[MICRO_BATCH_COUNTS]
        else:
            counts = npy_format.open_memmap(path, mode="r")
            if counts.dtype.names is not None:
                return read_loads(path)
        if counts.ndim not in (3, 4, 5) or counts.dtype.kind not in "iuf" or not counts.size:
            raise ValueError(f"got {counts.dtype} {list(counts.shape)}, wanted numbers {_SHAPES}")
        least, most = float(counts.min()), float(counts.max())
        if not (0 <= least <= most <= _MOST and np.all(counts == counts.astype(np.int32))):
            raise ValueError(f"got {least:g} to {most:g}, wanted whole numbers from 0 to {_MOST}")
    except (PermissionError, ConfigurationError):
        raise
    except Exception as error:  # damaged files raise many kinds of errors in numpy
        reason = shorten(str(error).rstrip(".") or type(error).__name__, 150, placeholder=" …")
        raise ConfigurationError(f"{path}: {reason}; correct the file") from None
    counts_ILDE = np.asarray(counts[:, :, None] if counts.ndim == 3 else counts, np.int32)
    return RecordedLoads(
        counts_ILDE, *(np.arange(1, counts.shape[axis] + 1) for axis in (0, 2 if counts.ndim == 5 else 1))
    )


def _read_table(path: Path, num_experts: int) -> RecordedLoads:
    """Read rows of iteration, layer, expert and tokens, and of a device if there are several.

    Experts and devices are counted from 0; what has no row has no tokens. A ConfigurationError names the line
    that is wrong.
    """
    loads: dict[tuple[int, int, int], NDArray[np.int32]] = {}
    line, highest = 1, 0
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, strict=True)
            if missing := [name for name in _COLUMNS if name not in {"device", *(rows.fieldnames or ())}]:
                raise ValueError(f"got no column {missing[0]}, wanted {', '.join(_COLUMNS)}")
            for row in rows:
                line, cells = rows.line_num, {"device": "0", **row}
                if None in row:
                    raise ValueError("got more cells than the first line has columns, wanted a name for each")
                for name in _COLUMNS:
                    if not (text := cells[name] or "").isdecimal() or int(text) > _MOST:
                        raise ValueError(f"got {name} '{text}', wanted a whole number from 0 to {_MOST}")
                iteration, layer, device, expert, tokens = (int(cells[name]) for name in _COLUMNS)
                if expert >= num_experts:
                    raise ValueError(f"got expert {expert}, wanted 0 to {num_experts - 1} as in the model")
                counts_E = loads.setdefault((iteration, layer, device), np.full(num_experts, -1, np.int32))
                if counts_E[expert] >= 0:
                    raise ValueError(f"got expert {expert} of this iteration and layer again, wanted one row")
                counts_E[expert], highest = tokens, max(highest, expert)
            if not loads or highest < num_experts - 1:
                raise ValueError(f"got no expert after {highest}, wanted {num_experts} as in the model")
    except (ValueError, csv.Error) as error:
        raise ConfigurationError(f"{path}: line {line}: {error}; correct the file") from None
    iterations, layers, devices = ([*dict.fromkeys(sorted(column))] for column in zip(*loads, strict=True))
    empty_E = np.zeros(num_experts, np.int32)
    counts = [[[loads.get((i, n, d), empty_E) for d in devices] for n in layers] for i in iterations]
    return RecordedLoads(np.array(counts).clip(min=0), np.array(iterations), np.array(layers))
