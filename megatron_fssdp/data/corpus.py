"""Finds and reads the texts to train on: files that the user names, or Python's standard library."""

import ast
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import batched
from pathlib import Path
from typing import NamedTuple

from megatron_fssdp.config.errors import ConfigurationError

JSON_SUFFIXES = (".jsonl", ".json")
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", *JSON_SUFFIXES)
TEXT_KEY = "text"

# Folders below the standard library that hold other sources, compiled files, or only tests.
_NOT_STANDARD_LIBRARY = ("site-packages", "dist-packages", "__pycache__")
_TESTS = ("test", "tests", "idle_test", "idlelib_test")

MAX_WORDS = 100  # The remaining words of a sentence form the next sentence.
_MIN_WORDS = 3
_LEAST_LETTERS = 0.7
# Sentences are split after a full stop and before a capital letter, but not after "e.g.", "i.e." or initials.
_SENTENCES = re.compile(r"(?<=[.!?])(?<!\b[A-Za-z]\.)(?<!i\.e\.)(?<!e\.g\.)[\"')\]]*\s+(?=[\"'(`]?[A-Z])")


class Document(NamedTuple):
    """A text of a corpus."""

    text: str
    is_python: bool
    num_bytes: int  # in its file


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order. A text file is one document, and so is each line of a JSON-lines file."""

    name: str  # in messages
    files: tuple[Path, ...]
    folders: tuple[Path, ...] = ()  # in which files were looked for
    json_key: str = TEXT_KEY  # key of the text in the lines of files with a suffix of JSON_SUFFIXES

    def __post_init__(self) -> None:
        if not self.num_bytes:
            raise ConfigurationError(
                f"{self.name}: no text found; give files, or folders with {', '.join(TEXT_SUFFIXES)} files"
            )

    @cached_property
    def num_bytes(self) -> int:
        """Total size of all files, in bytes."""
        return sum(file.stat().st_size for file in self.files)

    def documents(self) -> Iterator[Document]:
        """Yield the documents, or raise a ConfigurationError: a file or line has no readable text."""
        for file in self.files:
            try:
                if file.suffix in JSON_SUFFIXES:
                    yield from self._lines(file)
                else:
                    content = file.read_bytes()
                    yield Document(content.decode("utf-8"), file.suffix == ".py", len(content))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(
                    f"{file}: cannot be read ({error}); wanted UTF-8 text; convert the file or leave it out"
                ) from None

    def _lines(self, file: Path) -> Iterator[Document]:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield Document(json.loads(line)[self.json_key] + "", False, len(line))
                except (ValueError, TypeError, KeyError):
                    raise ConfigurationError(
                        f"{file}: line {number}: wanted a JSON object with text under the key "
                        f"'{self.json_key}'; correct the line, or name another key with --json-key"
                    ) from None


def corpus_from_paths(paths: Iterable[Path], json_key: str = TEXT_KEY) -> Corpus:
    """Collect files with any suffix, and inside folders those with a suffix of ``TEXT_SUFFIXES``, once each.

    A path that does not exist, or files without text, are a ConfigurationError.
    """
    paths, distinct = list(paths), dict[Path, Path]()
    for path in paths:
        if not path.exists():
            raise ConfigurationError(f"{path}: no such file or folder; give text to build data from")
        files = _files_below(path, TEXT_SUFFIXES, _NOT_STANDARD_LIBRARY) if path.is_dir() else [path]
        for file in files:
            distinct.setdefault(file.resolve(), file)
    folders, name = tuple(filter(Path.is_dir, paths)), ", ".join(map(str, paths[:3]))
    return Corpus(name, tuple(distinct.values()), folders, json_key)


def default_corpus() -> Corpus:
    """Collect the sources of the running Python's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _files_below(root, (".py",), (*_NOT_STANDARD_LIBRARY, *_TESTS))
    return Corpus(f"the standard library's sources in {root}", tuple(files))


def _files_below(root: Path, suffixes: tuple[str, ...], skipped: tuple[str, ...]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(suffixes))


def sentences(text: str, is_python: bool) -> list[str]:
    """Return the sentences of a document in order, once each: of a Python source those of its docstrings.

    Simple rules leave out doctests, tables and rulers. They sometimes split after an abbreviation.
    """
    blocks = _docstrings(text) if is_python else [text]
    return list(dict.fromkeys(sentence for block in blocks for sentence in _sentences_of(block)))


def _docstrings(source: str) -> list[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]


def _sentences_of(block: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", block):
        if paragraph.lstrip().startswith((">>>", "$ ")):
            continue
        for sentence in _SENTENCES.split(" ".join(paragraph.split())):
            for words in batched(sentence.lstrip("-*+# ").split(), MAX_WORDS):
                characters = "".join(words)
                num_letters = sum(map(str.isalpha, characters))
                if len(words) >= _MIN_WORDS and num_letters >= _LEAST_LETTERS * len(characters):
                    yield " ".join(words)
