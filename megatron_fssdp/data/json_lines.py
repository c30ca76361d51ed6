"""Reads Megatron's text format: files with one JSON object per line, whose key ``text`` holds a document."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.source_file import SourceFile

JSON_SUFFIXES = (".jsonl", ".json")
TEXT_KEY = "text"

PART_BYTES = 4 << 20
"""Bytes of a part of a file: as many as the builder tokenizes at a time. Large files need little memory."""


@dataclass(frozen=True)
class JsonLinesPart(SourceFile):
    """The lines of a file that begin in a range of bytes. Each line is one document.

    Attributes:
        start: First byte of the range. ``num_bytes`` is its length.
        key: Key of the JSON objects that holds the text.
    """

    start: int = 0
    key: str = TEXT_KEY

    @property
    def identity(self) -> str:
        """Text that decides the documents of this part."""
        return f"{super().identity}\0{self.start}\0{self.key}"

    def documents(self) -> Iterator[str]:
        """Yield the texts of the lines. Empty lines are left out.

        Raises:
            ConfigurationError: The file cannot be read, or a line is no JSON object with the key.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(max(self.start - 1, 0))
                if self.start:
                    file.readline()  # a line that begins in the range before
                while (position := file.tell()) < self.start + self.num_bytes and (line := file.readline()):
                    if line.strip():
                        yield self._text(line, position)
        except OSError as error:
            raise ConfigurationError(
                f"{self.path}: cannot be read ({error.strerror}); make it readable or leave it out"
            ) from None

    def _text(self, line: bytes, position: int) -> str:
        try:
            entry = json.loads(line)
        except ValueError as error:  # also bytes that are not UTF-8
            raise self._refusal(position, f"not JSON ({error}); wanted one JSON object per line") from None
        if not isinstance(entry, dict):
            raise self._refusal(position, "wanted a JSON object with the text of one document")
        if not isinstance(entry.get(self.key), str):
            keys = ", ".join(name for name, value in entry.items() if isinstance(value, str)) or "none"
            raise self._refusal(
                position,
                f"no text under the key '{self.key}'; keys with text: {keys}; name one with --json-key",
            )
        return str(entry[self.key])

    def _refusal(self, position: int, problem: str) -> ConfigurationError:
        number, read_bytes = 0, 0
        with self.path.open("rb") as file:
            while read_bytes <= position and (line := file.readline()):
                number, read_bytes = number + 1, read_bytes + len(line)
        return ConfigurationError(f"{self.path}: line {number}: {problem}")


def parts_of(path: Path, key: str = TEXT_KEY) -> list[SourceFile]:
    """Divide a file into parts of about ``PART_BYTES``.

    Args:
        path: File with one JSON object per line.
        key: Key of the objects that holds the text.
    """
    status = path.stat()
    return [
        JsonLinesPart(path, min(PART_BYTES, status.st_size - start), status.st_mtime_ns, start, key)
        for start in range(0, status.st_size, PART_BYTES)
    ]
