"""One text file to train on."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError


@dataclass(frozen=True)
class SourceFile:
    """One text file of a corpus. It is one document.

    Attributes:
        path: Path of the file.
        num_bytes: Size of the file when it was listed, in bytes.
        modified_ns: Modification time of the file when it was listed, in nanoseconds.
    """

    path: Path
    num_bytes: int
    modified_ns: int

    @property
    def identity(self) -> str:
        """Text that decides the documents: path, size and modification time."""
        return f"{self.path.resolve()}\0{self.num_bytes}\0{self.modified_ns}"

    def documents(self) -> Iterator[str]:
        """Yield the texts of the documents.

        Raises:
            ConfigurationError: See :meth:`read`.
        """
        yield self.read()

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
