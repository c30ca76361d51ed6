"""Reads and writes ``manifest.json``, which describes a folder of built data."""

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.json_records import Count, parse_record

MANIFEST_FILE = "manifest.json"
DATA_NAME = "text"


@dataclass(frozen=True)
class BuiltFile:
    """Size in bytes and SHA-256 hash, in hexadecimal, of one file of built data."""

    num_bytes: Count
    sha256: str


@dataclass(frozen=True)
class DataManifest:
    """Description of built data."""

    fingerprint: str  # a hash of the sources and settings that it was built from
    tokenizer: str
    vocab_size: Count
    eod_id: Count  # ends a document; the sizes around it count it, too
    num_documents: Count
    num_tokens: Count
    files: dict[str, BuiltFile]  # by name

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` into a folder."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")


def read_manifest(folder: Path, complete: bool = True) -> DataManifest:
    """Read the manifest of built data; ``complete``: its files must exist with the right sizes.

    Raises:
        ConfigurationError: The folder contains no built data, or the data is damaged.
    """
    try:
        manifest = parse_record(DataManifest, (folder / MANIFEST_FILE).read_bytes())
    except FileNotFoundError:
        raise ConfigurationError(
            f"{folder}: no built data in this folder (no {MANIFEST_FILE}); "
            f"run `megatron-fssdp data build --out {folder}`"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{folder / MANIFEST_FILE}: damaged, or not of built data ({error}); build data in another folder"
        ) from None
    for name, file in manifest.files.items() if complete else ():
        found = None
        with contextlib.suppress(OSError, ValueError):  # a name with a null byte, or too long a name
            found = (folder / name).stat().st_size
        if found != file.num_bytes:
            raise ConfigurationError(
                f"{folder / name}: got {'no file' if found is None else f'{found} bytes'}, wanted "
                f"{file.num_bytes} bytes; build the data again with --rebuild"
            )
    return manifest
