"""Reads and writes ``manifest.json``, which describes a folder of built data."""

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.json_records import Count, parse_record
from megatron_fssdp.config.written_files import written_file
from megatron_fssdp.data.corpus import Corpus

MANIFEST_FILE = "manifest.json"
DATA_NAME = "text"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class BuiltFile:
    """Size and hash of one file of built data.

    Attributes:
        num_bytes: Size of the file, in bytes.
        sha256: SHA-256 hash of the file, in hexadecimal.
    """

    num_bytes: Count
    sha256: str


@dataclasses.dataclass(frozen=True)
class _Format:
    format: int


@dataclasses.dataclass(frozen=True)
class DataManifest:
    """Description of built data.

    Attributes:
        fingerprint: Hash of the sources and settings that the data was built from.
        tokenizer: Kind of tokenizer.
        vocab_size: Number of token ids, end-of-document included.
        eod_id: Token id that ends a document.
        num_documents: Number of documents.
        num_tokens: Number of tokens, end-of-document included.
        files: Size and hash of each file, by file name.
    """

    fingerprint: str
    tokenizer: str
    vocab_size: Count
    eod_id: Count
    num_documents: Count
    num_tokens: Count
    files: dict[str, BuiltFile]

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` into a folder."""
        text = json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n"
        with written_file(folder / MANIFEST_FILE, "--out") as partial:
            partial.write_text(text, encoding="utf-8")


def fingerprint(corpus: Corpus, tokenizer: str, vocab_size: int) -> str:
    """Return a hash of everything that decides the built data.

    This includes the documents' paths, sizes and modification times, the tokenizer and its vocabulary size.
    """
    digest = hashlib.sha256(f"{_FORMAT} {tokenizer} {vocab_size}\n".encode())
    for file in corpus.files:
        digest.update(f"{file.identity}\n".encode())
    return digest.hexdigest()


def describe_file(path: Path) -> BuiltFile:
    """Return the size and hash of a file."""
    with path.open("rb") as file:
        return BuiltFile(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def read_manifest(folder: Path) -> DataManifest:
    """Read the manifest of built data and check that its files exist with the right sizes.

    Args:
        folder: Folder that ``megatron-fssdp data build --out`` wrote.

    Returns:
        The manifest.

    Raises:
        ConfigurationError: The folder contains no built data, or the data is damaged.
    """
    path = folder / MANIFEST_FILE
    try:
        text = path.read_bytes()
        if parse_record(_Format, text).format != _FORMAT:
            raise ValueError("another version of megatron-fssdp wrote it")
        manifest = parse_record(DataManifest, text)
    except FileNotFoundError:
        raise ConfigurationError(
            f"{folder}: no built data in this folder (no {MANIFEST_FILE}); "
            f"run `megatron-fssdp data build --out {folder}`"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: damaged ({error}); build the data again with --rebuild") from None
    for name, file in manifest.files.items():
        found = None
        with contextlib.suppress(OSError, ValueError):  # a name with a null byte, or too long a name
            found = (folder / name).stat().st_size
        if found != file.num_bytes:
            raise ConfigurationError(
                f"{folder / name}: got {'no file' if found is None else f'{found} bytes'}, wanted "
                f"{file.num_bytes} bytes; build the data again with --rebuild"
            )
    return manifest
