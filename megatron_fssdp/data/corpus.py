"""Finds the text files to train on: files that the user names, or Python's standard library."""

import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.json_lines import JSON_SUFFIXES, TEXT_KEY, parts_of
from megatron_fssdp.data.source_file import SourceFile

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")

# Folders below the standard library that hold other sources, compiled files, or only tests.
_NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TESTS = frozenset({"test", "tests", "idle_test", "idlelib_test"})


@dataclass(frozen=True)
class Corpus:
    """Text documents in a fixed order.

    Attributes:
        name: Name of the corpus in messages.
        files: Files of the documents. A large JSON-lines file is several entries.
    """

    name: str
    files: tuple[SourceFile, ...]

    def __post_init__(self) -> None:
        if not self.num_bytes:
            raise ConfigurationError(
                f"{self.name}: no text found; give files with text or folders with "
                f"{', '.join((*TEXT_SUFFIXES, *JSON_SUFFIXES))} files"
            )

    @property
    def num_bytes(self) -> int:
        """Total size of all documents, in bytes."""
        return sum(file.num_bytes for file in self.files)


def corpus_from_paths(paths: Iterable[Path], json_key: str = TEXT_KEY) -> Corpus:
    """Collect files, and the text files inside folders, into a corpus.

    Args:
        paths: Files and folders. Files are taken with any suffix. Inside folders, files with a suffix of
            ``TEXT_SUFFIXES`` or ``JSON_SUFFIXES`` are taken, in the order of their names.
        json_key: Key that holds the text in the lines of files with a suffix of ``JSON_SUFFIXES``.

    Returns:
        The corpus. It contains each file once.

    Raises:
        ConfigurationError: A path does not exist, or the files contain no text.
    """
    paths = list(paths)
    found: dict[Path, list[SourceFile]] = {}
    for path in paths:
        if path.is_dir():
            files = _files_below(path, _NOT_STANDARD_LIBRARY)
            wanted = [file for file in files if file.suffix in (*TEXT_SUFFIXES, *JSON_SUFFIXES)]
        elif path.is_file():
            wanted = [path]
        else:
            raise ConfigurationError(f"{path}: no such file or folder; give text to build data from")
        for file in wanted:
            is_json = file.suffix in JSON_SUFFIXES
            found.setdefault(file.resolve(), parts_of(file, json_key) if is_json else [_describe(file)])
    every = tuple(part for parts in found.values() for part in parts)
    return Corpus(name=", ".join(str(path) for path in paths[:3]), files=every)


def default_corpus(with_tests: bool = False) -> Corpus:
    """Collect the sources of the running Python's standard library, in the order of their paths.

    Args:
        with_tests: Whether to include the library's own test folders.

    Returns:
        The corpus. Files that are not UTF-8 are left out.

    Raises:
        ConfigurationError: This Python was installed without the sources of its standard library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = _NOT_STANDARD_LIBRARY if with_tests else _NOT_STANDARD_LIBRARY | _TESTS
    files = [file for file in _files_below(root, skipped) if file.suffix == ".py" and _is_utf8(file)]
    try:
        return Corpus(name="the standard library's sources", files=tuple(map(_describe, files)))
    except ConfigurationError:
        raise ConfigurationError(
            f"{root}: this Python was installed without the sources of its standard library; give text files "
            "instead: megatron-fssdp data build PATH…"
        ) from None


def _files_below(root: Path, skipped: frozenset[str]) -> Iterable[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            yield Path(folder) / name


def _describe(path: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(path=path, num_bytes=status.st_size, modified_ns=status.st_mtime_ns)


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True
