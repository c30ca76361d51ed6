"""Files of JSON lines that grow with a run: a killed run loses at most the line that it was writing."""

import json
import math
import os
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.json_records import parse_record
from megatron_fssdp.config.written_files import cannot_write
from megatron_fssdp.records.array_files import unreadable


class JsonLinesWriter:
    """Appends lines to a file, each completely and without delay. A half-written last line is cut first.

    Args:
        path: File to append to. It is created with its folder if it does not exist.

    Raises:
        ConfigurationError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
                os.truncate(path, content.rfind(b"\n") + 1)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise cannot_write(path, "record_dir", error) from None

    def append(self, record: dict[str, Any]) -> None:
        """Write one line.

        Raises:
            ConfigurationError: The file cannot be written, for example because the disk is full. The file is
                unchanged.
        """
        line = memoryview((json.dumps(without_nan(record), allow_nan=False) + "\n").encode())
        end = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(end)
            raise cannot_write(self._path, "record_dir", error) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_json_lines[RecordT](path: Path, record_cls: type[RecordT]) -> list[RecordT]:
    """Read every complete line of a file into a dataclass.

    Raises:
        ConfigurationError: The file is missing or cannot be read, or a line is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    records, lines = [], text.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse_record(record_cls, line))
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # the run was killed while it wrote this line, or is writing it now
            raise ConfigurationError(
                f"{path}: line {number} is damaged or incomplete ({error}); delete this line or record the "
                "run again"
            ) from None
    return records


def without_nan(value: Any) -> Any:
    """Return plain values with None in place of every number that JSON does not support (NaN, infinity)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return value
