"""Turns texts into token ids: byte-level byte-pair encoding, BERT's WordPiece, or a tokenizer that exists."""

import hashlib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError

TRAINED_KINDS = ("bpe", "bytes", "wordpiece")
"""Kinds of tokenizers that data is built with; any other is one that exists."""

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
VOCAB_FILE = "vocab.txt"  # a list of words, which Megatron's own tokenizers load
TOKENIZER_FILES = (TOKENIZER_FILE, CONFIG_FILE, VOCAB_FILE)
PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MIN_VOCAB_SIZE = 257  # 256 bytes and end-of-document

# The time to learn from a word, and to encode a text, grows with the square of its length, so both are cut.
_MAX_WORD = 100
_PIECE_CHARS = 50_000
_PATIENCE_S = 4.0  # for the Hugging Face hub to answer
_EOD = "<|endoftext|>"
_USUAL_ENDS = (_EOD, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[SEP]")


class TextTokenizer:
    """A tokenizer of the ``tokenizers`` library. Special tokens inside a text count as ordinary text.

    ``identity`` decides the token ids. ``files`` has the texts from which the tokenizer can be loaded again,
    by file name. A tokenizer without ``eod_token`` is a ConfigurationError.
    """

    def __init__(self, kind: str, library: Any, eod_token: str) -> None:
        self._library, json_text = library, library.to_str()
        library.encode_special_tokens = True
        self.ids: dict[str, int] = library.get_vocab(with_added_tokens=True)
        if eod_token not in self.ids:
            raise ConfigurationError(
                f"--eod-token {eod_token}: the tokenizer does not have this token; name one of its own"
            )
        self.kind = kind  # one of TRAINED_KINDS, or "huggingface"
        self.eod_id, self.vocab_size = self.ids[eod_token], max(self.ids.values()) + 1  # ids may have gaps
        self.identity = f"{kind} {hashlib.sha256(json_text.encode()).hexdigest()} {eod_token}"
        hint = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eod_token}
        self.files = {TOKENIZER_FILE: json_text, CONFIG_FILE: json.dumps(hint) + "\n"}

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the token ids of each text, int64 ``[tokens]``, without end-of-document."""
        pieces = [_pieces_of(text) for text in texts]
        every = [piece for of_text in pieces for piece in of_text]
        encoded = iter(self._library.encode_batch_fast(every, add_special_tokens=False))
        return [np.concatenate([np.array(next(encoded).ids, np.int64) for _ in each]) for each in pieces]


def train_bpe(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train byte-level byte-pair encoding. The last id is end-of-document.

    Little text gives fewer than ``vocab_size`` ids. With ``MIN_VOCAB_SIZE``, each byte is a token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([byte_level, pre_tokenizers.FixedLength(_MAX_WORD)])
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator((piece for text in texts for piece in _pieces_of(text)), trainer)
    library.add_special_tokens([AddedToken(_EOD, special=True)])
    return TextTokenizer("bytes" if vocab_size == MIN_VOCAB_SIZE else "bpe", library, _EOD)


def load_pretrained(name: str, eod_token: str | None = None) -> TextTokenizer:
    """Load a ``tokenizer.json``: a file, the one in a folder, or the one of a name on the Hugging Face hub.

    By default, a usual token of the tokenizer ends a document. A missing or damaged tokenizer, or one without
    such a token, is a ConfigurationError.
    """
    from tokenizers import Tokenizer

    path = Path(name)
    try:
        if not path.exists():
            path = _from_hub(name)
        library = Tokenizer.from_file(str(path / TOKENIZER_FILE if path.is_dir() else path))
    except Exception as error:  # errors of the library and of the network have many types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigurationError(
            f"--tokenizer {name}: is none of bpe, bytes and wordpiece, and no folder, file or name of a "
            f"tokenizer on the Hugging Face hub ({reason}); give a folder with {TOKENIZER_FILE}"
        ) from None
    end = eod_token or next((end for end in _USUAL_ENDS if library.token_to_id(end) is not None), None)
    if end is None:
        raise ConfigurationError(
            f"--tokenizer {name}: it does not say which token ends a document; name it with --eod-token"
        )
    return TextTokenizer("huggingface", library, end)


def _from_hub(name: str) -> Path:
    """Return the file of a tokenizer on the hub, from the cache if the hub does not answer."""
    from huggingface_hub import constants, get_session, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    answers: list[Any] = []

    def ask() -> None:
        with suppress(Exception):  # errors of the network have many types
            answers.append(get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S))

    # The download would try again for half a minute. The thread also limits the search for the address.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PATIENCE_S)
    try:
        return Path(hf_hub_download(name, TOKENIZER_FILE, local_files_only=not answers))
    except LocalEntryNotFoundError:
        raise OSError(f"{constants.ENDPOINT} does not answer, and the cache has no such tokenizer") from None


def _pieces_of(text: str) -> list[str]:
    return [text[at : at + _PIECE_CHARS] for at in range(0, max(len(text), 1), _PIECE_CHARS)]


class WordPieceTokenizer(TextTokenizer):
    """WordPiece tokenizer (Devlin et al. 2019) with BERT's normalization. A document ends with ``[SEP]``.

    To mask tokens, Megatron's data set asks which of them begin a word and which are special. A tokenizer
    whose first tokens are not BERT's special tokens is a ConfigurationError.
    """

    def __init__(self, library: Any) -> None:
        super().__init__("wordpiece", library, SEP)
        self.inv_vocab: dict[int, str] = {index: word for word, index in self.ids.items()}
        got = tuple(self.inv_vocab.get(index) for index in range(len(SPECIAL_TOKENS)))
        if got != SPECIAL_TOKENS:
            raise ConfigurationError(
                f"{TOKENIZER_FILE}: begins with {got}, wanted BERT's {SPECIAL_TOKENS}; build the data with "
                "--tokenizer wordpiece"
            )
        self.pad, self.unk, self.cls, self.sep, self.mask = range(len(SPECIAL_TOKENS))
        self.files[VOCAB_FILE] = "".join(f"{self.inv_vocab[index]}\n" for index in range(self.vocab_size))

    @property
    def unique_identifiers(self) -> "OrderedDict[str, str]":
        """What decides whether Megatron can reuse its index caches."""
        return OrderedDict({"class": type(self).__qualname__, "identity": self.identity})

    @classmethod
    def load(cls, folder: Path) -> "WordPieceTokenizer":
        """Load the tokenizer of a folder of built data."""
        from tokenizers import Tokenizer

        try:
            library = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        except Exception as error:  # the library raises plain Exception
            raise ConfigurationError(
                f"{folder / TOKENIZER_FILE}: cannot be read ({error}); build the data again"
            ) from None
        return cls(library)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "WordPieceTokenizer":
        """Train on sentences. Little text gives fewer than ``vocab_size`` token ids."""
        from tokenizers import trainers

        texts = list(texts)
        learning = _bare_tokenizer({UNK: 0})
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            # The trainer numbers letters inside words in the order of a hash table, and breaks ties by these
            # numbers. Numbers that are fixed in advance make the result reproducible.
            special_tokens=[*SPECIAL_TOKENS, *_letters(texts, learning.normalizer, vocab_size // 4)],
            limit_alphabet=0,
            show_progress=False,
        )
        learning.train_from_iterator(texts, trainer)
        library = _bare_tokenizer(learning.get_vocab())
        library.add_special_tokens(list(SPECIAL_TOKENS))
        return cls(library)


def _bare_tokenizer(words: dict[str, int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    library = Tokenizer(models.WordPiece(vocab=words, unk_token=UNK))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    cut = pre_tokenizers.FixedLength(_MAX_WORD)
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), cut])
    library.decoder = decoders.WordPiece()
    return library


def _letters(texts: Iterable[str], normalizer: Any, most: int) -> list[str]:
    """Return the most frequent letters, each as the start of a word and as a part inside a word."""
    counts = Counter(letter for text in texts for letter in normalizer.normalize_str(text))
    frequent = sorted(counts, key=lambda letter: (-counts[letter], letter))[:most]
    letters = sorted(letter for letter in frequent if not letter.isspace())
    return letters + [f"##{letter}" for letter in letters]
