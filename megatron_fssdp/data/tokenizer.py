"""Tokenizers: byte-level ones, whose end-of-document id is one that text never contains.

The data is tokenized before training, so Megatron is only told the size of the
vocabulary and the end-of-document id. That id is always the last one, which is
where Megatron's NullTokenizer looks for it.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError

TokenizerKind = Literal["bpe", "bytes", "wordpiece"]

EOD_TOKEN = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
NUM_BYTES_VALUES = 256
MIN_VOCAB_SIZE = NUM_BYTES_VALUES + 1

_LEAST_VOCABULARY: dict[TokenizerKind, tuple[int, str]] = {
    "bpe": (MIN_VOCAB_SIZE, "256 bytes and end-of-document"),
    "wordpiece": (64, "letters and words"),
}


class Tokenizer(Protocol):
    """Turns documents into token ids."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, end-of-document included."""

    @property
    def eod_id(self) -> int:
        """Id that ends a document."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Token ids of each text, without end-of-document."""

    def save(self, folder: Path) -> None:
        """Write what is needed to load the tokenizer again."""


def read_tokenizer_file(folder: Path) -> str:
    """The text of a folder's ``tokenizer.json``.

    Raises:
        ConfigurationError: It cannot be read.
    """
    try:
        return (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{folder / TOKENIZER_FILE}: cannot be read ({error}); build the data again"
        ) from None


def parse_tokenizer(json_text: str) -> Any:
    """The ``tokenizers`` library's tokenizer of a ``tokenizer.json``; special tokens in a text are text.

    Raises:
        ConfigurationError: It is none.
    """
    from tokenizers import Tokenizer as JsonTokenizer

    try:
        tokenizer = JsonTokenizer.from_str(json_text)
    except Exception as error:  # the library raises plain Exception
        raise ConfigurationError(f"{TOKENIZER_FILE} is damaged ({error}); build the data again") from None
    tokenizer.encode_special_tokens = True
    return tokenizer


class ByteTokenizer:
    """One token a byte of UTF-8; needs no training."""

    vocab_size = NUM_BYTES_VALUES + 1
    eod_id = NUM_BYTES_VALUES

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Token ids of each text, without end-of-document."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64) for text in texts]

    def save(self, folder: Path) -> None:
        """Nothing to write."""


class BpeTokenizer:
    """Byte-level byte-pair encoding, trained on the corpus with the ``tokenizers`` library."""

    def __init__(self, json_text: str) -> None:
        """Load from the JSON text of a saved tokenizer.

        Raises:
            ConfigurationError: It is no tokenizer with an end-of-document token in the last place.
        """
        self._tokenizer = parse_tokenizer(json_text)
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.eod_id: int = self.vocab_size - 1
        if self._tokenizer.token_to_id(EOD_TOKEN) != self.eod_id:
            raise ConfigurationError(
                f"{TOKENIZER_FILE}: {EOD_TOKEN} has id {self._tokenizer.token_to_id(EOD_TOKEN)}, "
                f"wanted the last id {self.eod_id}; build the data again"
            )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BpeTokenizer":
        """Train on texts.

        Args:
            texts: Documents.
            vocab_size: Ids wanted, end-of-document included. Little text gives fewer.

        Returns:
            The tokenizer.

        Raises:
            ConfigurationError: The vocabulary has no room for the 256 bytes and end-of-document.
        """
        check_vocab_size("bpe", vocab_size)
        from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as JsonTokenizer

        tokenizer = JsonTokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.add_special_tokens([AddedToken(EOD_TOKEN, special=True)])
        return cls(tokenizer.to_str())

    @classmethod
    def load(cls, folder: Path) -> "BpeTokenizer":
        """Load from a folder that :meth:`save` wrote.

        Raises:
            ConfigurationError: The file is missing or damaged.
        """
        return cls(read_tokenizer_file(folder))

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Token ids of each text, without end-of-document."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and the small file that lets ``transformers`` load the folder too."""
        (folder / TOKENIZER_FILE).write_text(self._tokenizer.to_str(), encoding="utf-8")
        hint = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOD_TOKEN}
        (folder / "tokenizer_config.json").write_text(json.dumps(hint, indent=2) + "\n", encoding="utf-8")


def check_vocab_size(tokenizer: TokenizerKind, vocab_size: int) -> None:
    """Raise unless a trained tokenizer can have that many ids; bytes have as many as they have.

    Raises:
        ConfigurationError: The vocabulary has no room for what every one of its kind has.
    """
    least, content = _LEAST_VOCABULARY.get(tokenizer, (0, ""))
    if vocab_size < least:
        raise ConfigurationError(f"vocab size: got {vocab_size}, wanted {least} or more ({content})")
