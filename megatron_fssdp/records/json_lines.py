"""Files of JSON lines that grow with a run: a killed run loses at most the line that it was writing."""

from pathlib import Path
from textwrap import shorten
from typing import Any

from pydantic_core import to_json

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.json_records import parse_record
from megatron_fssdp.config.written_files import cannot_write


def append_lines(path: Path, *records: Any) -> None:
    """Add dataclasses to a file, each as one line. A half-written last line is cut first.

    The file is created with its folder if it does not exist. Numbers that JSON does not have (NaN, infinity)
    become null.

    Raises:
        ConfigurationError: The file cannot be written, for example because the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            if end := file.tell():
                file.seek(end - 1)
                if file.read() != b"\n":
                    file.truncate(path.read_bytes().rfind(b"\n") + 1)
            file.writelines(to_json(record, inf_nan_mode="null") + b"\n" for record in records)
    except OSError as error:
        raise cannot_write(path, "record_dir", error) from None


def read_json_lines[RecordT](path: Path, record_cls: type[RecordT]) -> list[RecordT]:
    """Read every complete line of a file into a dataclass.

    Raises:
        ConfigurationError: The file is missing or cannot be read, or a line is damaged.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    records = []
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


def unreadable(path: Path, error: Exception) -> ConfigurationError:
    """Return the error for a record that cannot be read, after the error that reading it raised."""
    if isinstance(error, FileNotFoundError):
        return ConfigurationError(f"{path}: no such file; give the folder of a run that recorded its loads")
    if isinstance(error, NotADirectoryError):
        return ConfigurationError(f"{path.parent}: is a file, wanted the folder of a run")
    reason = shorten(str(error) or type(error).__name__, 100, placeholder=" …")
    return ConfigurationError(
        f"{path}: damaged, incomplete or not a record of a run ({reason}); record the run again"
    )
