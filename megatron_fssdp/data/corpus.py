"""Finds the text files to train on: files that the user names, or Python's standard library."""

import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")

# Folders below the standard library that hold other sources, compiled files, or only tests.
_NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TESTS = frozenset({"test", "tests", "idle_test", "idlelib_test"})


@dataclass(frozen=True)
class SourceFile:
    """One text file of a corpus. Each file is one document.

    Attributes:
        path: Path of the file.
        num_bytes: Size of the file when it was listed, in bytes.
        modified_ns: Modification time of the file when it was listed, in nanoseconds.
    """

    path: Path
    num_bytes: int
    modified_ns: int

    def read(self) -> str:
        """Return the text of the file.

        Raises:
            ConfigurationError: The file no longer exists, cannot be read, or is not UTF-8.
        """
        try:
            return self.path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"{self.path}: not UTF-8 text (byte {error.start}); convert the file or leave it out"
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"{self.path}: cannot be read ({error.strerror}); make it readable or leave it out"
            ) from None


@dataclass(frozen=True)
class Corpus:
    """Text documents in a fixed order.

    Attributes:
        name: Name of the corpus in messages.
        files: Files of the documents.
    """

    name: str
    files: tuple[SourceFile, ...]

    def __post_init__(self) -> None:
        if not self.num_bytes:
            raise ConfigurationError(
                f"{self.name}: no text found; give files with text or folders with "
                f"{', '.join(TEXT_SUFFIXES)} files"
            )

    @property
    def num_bytes(self) -> int:
        """Total size of all documents, in bytes."""
        return sum(file.num_bytes for file in self.files)


def corpus_from_paths(paths: Iterable[Path]) -> Corpus:
    """Collect files, and the text files inside folders, into a corpus.

    Args:
        paths: Files and folders. Files are taken with any suffix. Inside folders, files with a suffix of
            ``TEXT_SUFFIXES`` are taken, in the order of their names.

    Returns:
        The corpus. It contains each file once.

    Raises:
        ConfigurationError: A path does not exist, or the files contain no text.
    """
    paths = list(paths)
    found: dict[Path, SourceFile] = {}
    for path in paths:
        if path.is_dir():
            for file in _files_below(path, _NOT_STANDARD_LIBRARY):
                if file.suffix in TEXT_SUFFIXES:
                    found.setdefault(file.resolve(), _describe(file))
        elif path.is_file():
            found.setdefault(path.resolve(), _describe(path))
        else:
            raise ConfigurationError(f"{path}: no such file or folder; give text to build data from")
    return Corpus(name=", ".join(str(path) for path in paths[:3]), files=tuple(found.values()))


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
