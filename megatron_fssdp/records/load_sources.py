"""Finds out who wrote the loads that somebody names, and reads them."""

from contextlib import suppress
from pathlib import Path

from numpy.lib.format import open_memmap

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.records.loads import LOADS_FILE, RecordedLoads, read_loads
from megatron_fssdp.records.own_counts import read_csv_counts, read_npy_counts
from megatron_fssdp.records.rank_traces import (
    ROUTER_TRACES,
    TOKENS_PER_EXPERT,
    OnProgress,
    RoutedModel,
    read_rank_traces,
)


def sources_in(path: Path) -> list[str]:
    """Return what a path has loads of: the pattern of files in a folder, or the ending of a file."""
    if path.is_file():
        return [path.name if path.name == LOADS_FILE and _is_record(path) else path.suffix]
    folder, _, files = TOKENS_PER_EXPERT.partition("/")
    patterns = [LOADS_FILE, ROUTER_TRACES, TOKENS_PER_EXPERT, *([files] if path.name == folder else [])]
    return [pattern for pattern in patterns if next(path.glob(pattern), None)]


def _is_record(path: Path) -> bool:
    """Whether a file has rows of named arrays, as a run records them, or is too damaged to tell."""
    with suppress(ValueError, OSError):
        return open_memmap(path, mode="r").dtype.names is not None
    return True


def read_any_loads(
    path: Path,
    model: RoutedModel,
    most: int | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> tuple[RecordedLoads, str]:
    """Read the loads of a folder or file, and say how they were read, if that is a question.

    Of traces, only the first ``most`` iterations are read if it is given.

    Raises:
        ConfigurationError: The path has no loads or several kinds, or they are damaged or of another model.
    """
    found = sources_in(path)
    if len(found) > 1:
        both = " and ".join(found)
        raise ConfigurationError(
            f"--loads {path}: has {both}, wanted one of them; move them to other folders"
        )
    if found == [LOADS_FILE] and path.is_dir():  # Somebody's own array may have this name.
        return read_any_loads(path / LOADS_FILE, model, most, on_progress)
    if found == [LOADS_FILE] or not found:
        return read_loads(path.parent if path.is_file() else path), ""
    if path.is_dir():
        loads, note = read_rank_traces(path, found[0], model, most, on_progress)
        return loads, f"{'router traces' if found[0] == ROUTER_TRACES else 'tokens per expert'} {note}"
    if found in ([".npy"], [".npz"]):
        return read_npy_counts(path), ""
    if found == [".csv"]:
        return read_csv_counts(path, model.num_experts), ""
    raise ConfigurationError(
        f"--loads {path}: is another file, wanted .npy, .npz or .csv, or the folder of traces"
    )
