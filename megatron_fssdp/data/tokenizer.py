"""Byte-level tokenizers: one token for each byte, or byte-pair encoding.

The data is tokenized before training. Megatron therefore needs only the size of the vocabulary and the
end-of-document id. This id is always the last one, where Megatron's NullTokenizer expects it. Text never
contains it.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError

TokenizerKind = Literal["bpe", "bytes", "wordpiece", "huggingface"]

EOD_TOKEN = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
NUM_BYTES_VALUES = 256
MIN_VOCAB_SIZE = NUM_BYTES_VALUES + 1

_LEAST_VOCABULARY: dict[TokenizerKind, tuple[int, str]] = {
    "bpe": (MIN_VOCAB_SIZE, "256 bytes and end-of-document"),
    "wordpiece": (64, "letters and words"),
}


class Tokenizer(Protocol):
    """Interface of a tokenizer, which turns texts into token ids."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, end-of-document included."""

    @property
    def eod_id(self) -> int:
        """Id that ends a document."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the token ids of each text, int64 ``[tokens]``, without end-of-document."""

    def save(self, folder: Path) -> None:
        """Write the files that are needed to load the tokenizer again."""


def read_tokenizer_file(folder: Path) -> str:
    """Return the text of ``tokenizer.json`` in a folder of built data.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    try:
        return (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{folder / TOKENIZER_FILE}: cannot be read ({error}); build the data again"
        ) from None


def parse_tokenizer(json_text: str) -> Any:
    """Build the ``tokenizers`` library's tokenizer from the text of a ``tokenizer.json``.

    The tokenizer treats names of special tokens inside a text as ordinary text.

    Raises:
        ConfigurationError: The text is not a valid tokenizer.
    """
    from tokenizers import Tokenizer as JsonTokenizer

    try:
        tokenizer = JsonTokenizer.from_str(json_text)
    except Exception as error:  # the library raises plain Exception
        raise ConfigurationError(f"{TOKENIZER_FILE} is damaged ({error}); build the data again") from None
    tokenizer.encode_special_tokens = True
    return tokenizer


class ByteTokenizer:
    """Tokenizer with one token for each byte of UTF-8. It needs no training."""

    vocab_size = NUM_BYTES_VALUES + 1
    eod_id = NUM_BYTES_VALUES

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the token ids of each text, int64 ``[tokens]``, without end-of-document."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64) for text in texts]

    def save(self, folder: Path) -> None:
        """Do nothing, because this tokenizer has no data of its own."""


class TrainedTokenizer:
    """A tokenizer of the ``tokenizers`` library.

    Args:
        json_text: Text of a ``tokenizer.json``.

    Raises:
        ConfigurationError: The text is not a valid tokenizer.
    """

    def __init__(self, json_text: str) -> None:
        self._tokenizer = parse_tokenizer(json_text)
        self.vocab_size: int = self._tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the token ids of each text, int64 ``[tokens]``.

        Special tokens are left out, except the one for unknown words.
        """
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


class BpeTokenizer(TrainedTokenizer):
    """Byte-level byte-pair encoding, trained on the corpus with the ``tokenizers`` library."""

    def __init__(self, json_text: str) -> None:
        """Load from the JSON text of a saved tokenizer.

        Raises:
            ConfigurationError: The text is not a valid tokenizer, or its last token is not end-of-document.
        """
        super().__init__(json_text)
        self.eod_id: int = self.vocab_size - 1
        if self._tokenizer.token_to_id(EOD_TOKEN) != self.eod_id:
            raise ConfigurationError(
                f"{TOKENIZER_FILE}: {EOD_TOKEN} has id {self._tokenizer.token_to_id(EOD_TOKEN)}, "
                f"wanted the last id {self.eod_id}; build the data again"
            )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BpeTokenizer":
        """Train a tokenizer on texts.

        Args:
            texts: Documents to train on.
            vocab_size: Wanted number of token ids, end-of-document included. A small amount of text gives
                fewer ids.

        Returns:
            The trained tokenizer.

        Raises:
            ConfigurationError: The vocabulary is too small for the 256 bytes and end-of-document.
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

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, and ``tokenizer_config.json`` for loading with ``transformers``."""
        (folder / TOKENIZER_FILE).write_text(self._tokenizer.to_str(), encoding="utf-8")
        hint = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOD_TOKEN}
        (folder / "tokenizer_config.json").write_text(json.dumps(hint, indent=2) + "\n", encoding="utf-8")


def check_vocab_size(tokenizer: TokenizerKind, vocab_size: int) -> None:
    """Check that a vocabulary size is large enough for a kind of tokenizer. ``bytes`` accepts any size.

    Raises:
        ConfigurationError: The vocabulary is too small for the tokens that every tokenizer of the kind has.
    """
    least, content = _LEAST_VOCABULARY.get(tokenizer, (0, ""))
    if vocab_size < least:
        raise ConfigurationError(f"--vocab-size: got {vocab_size}, wanted {least} or more ({content})")
