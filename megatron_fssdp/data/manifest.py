"""What a folder of built data holds: ``manifest.json``."""

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.json_records import Count, parse_record
from megatron_fssdp.config.written_files import written_whole
from megatron_fssdp.data.corpus import Corpus

MANIFEST_FILE = "manifest.json"
DATA_NAME = "text"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class BuiltFile:
    """A file of the data.

    Attributes:
        num_bytes: Its size.
        sha256: Its SHA-256, in hexadecimal.
    """

    num_bytes: Count
    sha256: str


@dataclasses.dataclass(frozen=True)
class _Format:
    format: int


@dataclasses.dataclass(frozen=True)
class DataManifest:
    """Built data.

    Attributes:
        fingerprint: Hash of the sources and settings it was built from.
        tokenizer: Kind of tokenizer.
        vocab_size: Number of token ids, end-of-document included.
        eod_id: Id that ends a document.
        num_documents: Documents.
        num_tokens: Tokens, end-of-document included.
        files: The files by name.
    """

    fingerprint: str
    tokenizer: str
    vocab_size: Count
    eod_id: Count
    num_documents: Count
    num_tokens: Count
    files: dict[str, BuiltFile]

    def write(self, folder: Path) -> None:
        """Write ``manifest.json``."""
        text = json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n"
        with written_whole(folder, "--out") as partial:
            (partial / MANIFEST_FILE).write_text(text, encoding="utf-8")


def fingerprint(corpus: Corpus, tokenizer: str, vocab_size: int) -> str:
    """Hash of what decides the built data: the documents' paths, sizes and times, and the tokenizer."""
    digest = hashlib.sha256(f"{_FORMAT} {tokenizer} {vocab_size}\n".encode())
    for file in corpus.files:
        digest.update(f"{file.path.resolve()}\0{file.num_bytes}\0{file.modified_ns}\n".encode())
    return digest.hexdigest()


def describe_file(path: Path) -> BuiltFile:
    """Size and hash of a file."""
    with path.open("rb") as file:
        return BuiltFile(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def read_manifest(folder: Path) -> DataManifest:
    """Read the manifest of built data and check that its files are there.

    Args:
        folder: What ``megatron-fssdp data build --out`` wrote.

    Returns:
        The manifest.

    Raises:
        ConfigurationError: There is no built data, or it is damaged.
    """
    path = folder / MANIFEST_FILE
    try:
        text = path.read_bytes()
        if parse_record(_Format, text).format != _FORMAT:
            raise ValueError("written by another version")
        manifest = parse_record(DataManifest, text)
    except FileNotFoundError:
        raise ConfigurationError(
            f"{folder}: no built data there (no {MANIFEST_FILE}); "
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
