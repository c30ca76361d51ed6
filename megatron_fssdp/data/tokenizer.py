"""Turns texts into token ids: byte-level byte-pair encoding, BERT's WordPiece, or a tokenizer that exists."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatron_fssdp.config.errors import ConfigurationError

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
VOCAB_FILE = "vocab.txt"  # a list of words, which Megatron's own tokenizers load
TOKENIZER_FILES = (TOKENIZER_FILE, CONFIG_FILE, VOCAB_FILE)
PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MIN_VOCAB_SIZE = 257  # 256 bytes and end-of-document
TRAINED_KINDS = {"bpe": MIN_VOCAB_SIZE, "bytes": MIN_VOCAB_SIZE, "wordpiece": 64}
"""Kinds of tokenizers that are trained, with their least ``vocab_size``; any other is one that exists."""

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

    def __init__(self, kind: str, library: Tokenizer, eod_token: str) -> None:
        self._library, json_text = library, library.to_str()
        library.encode_special_tokens = True
        self.ids: dict[str, int] = library.get_vocab(with_added_tokens=True)
        if eod_token not in self.ids:
            raise ConfigurationError(
                f"the tokenizer has no token {eod_token} to end a document; name one by --eod-token"
            )
        self.kind = kind  # one of TRAINED_KINDS, or "huggingface"
        self.eod_id, self.vocab_size = self.ids[eod_token], max(self.ids.values()) + 1  # ids may have gaps
        self.identity = f"{kind} {hashlib.sha256(json_text.encode()).hexdigest()} {eod_token}"
        hint = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eod_token}
        self.files = {TOKENIZER_FILE: json_text, CONFIG_FILE: json.dumps(hint) + "\n"}

    def encode(self, texts: Iterable[str]) -> list[NDArray[np.int64]]:
        """Return the token ids of each text, int64 ``[tokens]``, without end-of-document."""
        pieces = [_pieces_of(text) for text in texts]
        every = [piece for of_text in pieces for piece in of_text]
        encoded = iter(self._library.encode_batch_fast(every, add_special_tokens=False))
        return [np.concatenate([np.array(next(encoded).ids, np.int64) for _ in parts]) for parts in pieces]


def train_bpe(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train byte-level byte-pair encoding. The last id is end-of-document.

    Little text gives fewer than ``vocab_size`` ids. With ``MIN_VOCAB_SIZE``, each byte is a token.
    """
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
    usual = next((end for end in _USUAL_ENDS if library.token_to_id(end) is not None), _EOD)
    return TextTokenizer("huggingface", library, eod_token or usual)


def _from_hub(name: str) -> Path:
    """Return the file of a tokenizer on the hub, from the cache if the hub does not answer."""
    from huggingface_hub import constants, get_session, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    # The download would try again for half a minute. The thread also limits the search for the address.
    asking = ThreadPool(1).apply_async(get_session().head, (constants.ENDPOINT,), {"timeout": _PATIENCE_S})
    asking.wait(_PATIENCE_S)
    answers = asking.ready() and asking.successful()
    try:
        return Path(hf_hub_download(name, TOKENIZER_FILE, local_files_only=not answers))
    except LocalEntryNotFoundError:
        raise OSError(f"{constants.ENDPOINT} does not answer, and the cache has no such tokenizer") from None


def _pieces_of(text: str) -> list[str]:
    return [text[at : at + _PIECE_CHARS] for at in range(0, max(len(text), 1), _PIECE_CHARS)]


def train_tokenizer(kind: str, texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a tokenizer of one of ``TRAINED_KINDS``."""
    if kind == "wordpiece":
        return WordPieceTokenizer.train(texts, vocab_size)
    return train_bpe(texts if kind == "bpe" else (), vocab_size)


class WordPieceTokenizer(TextTokenizer):
    """WordPiece tokenizer (Devlin et al. 2019) with BERT's normalization. A document ends with ``[SEP]``.

    To mask tokens, Megatron's data set asks which of them begin a word and which are special.
    """

    def __init__(self, library: Tokenizer) -> None:
        super().__init__("wordpiece", library, SEP)
        self.inv_vocab: dict[int, str] = {index: word for word, index in self.ids.items()}
        self.pad, self.unk, self.cls, self.sep, self.mask = (self.ids[token] for token in SPECIAL_TOKENS)
        self.files[VOCAB_FILE] = "".join(f"{self.inv_vocab[index]}\n" for index in sorted(self.inv_vocab))
        # Megatron reuses an index cache whose tokenizer had the same identifiers.
        self.unique_identifiers = {"class": type(self).__qualname__, "identity": self.identity}

    @classmethod
    def load(cls, folder: Path) -> "WordPieceTokenizer":
        """Load the tokenizer of built data. One that is damaged or not BERT's is a ConfigurationError."""
        path = folder / TOKENIZER_FILE
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises plain Exception
            raise ConfigurationError(
                f"{path}: cannot be read ({error}); build the data again with --tokenizer wordpiece"
            ) from None

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "WordPieceTokenizer":
        """Train on sentences. Little text gives fewer than ``vocab_size`` token ids."""
        texts = list(texts)
        library = Tokenizer(models.WordPiece(unk_token=UNK))
        library.normalizer = normalizers.BertNormalizer(lowercase=True)
        cut = pre_tokenizers.FixedLength(_MAX_WORD)
        library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), cut])
        library.decoder = decoders.WordPiece()
        counts = Counter(letter for text in texts for letter in library.normalizer.normalize_str(text))
        frequent = sorted(counts, key=lambda letter: (-counts[letter], letter))[: vocab_size // 4]
        letters = sorted(letter for letter in frequent if not letter.isspace())
        # The trainer numbers letters inside words in the order of a hash table, and breaks ties by these
        # numbers. Numbers that are fixed in advance make the result reproducible.
        fixed = [*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters)]
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size, special_tokens=fixed, limit_alphabet=0, show_progress=False
        )
        library.train_from_iterator(texts, trainer)
        trained = json.loads(library.to_str())
        del trained["added_tokens"][len(SPECIAL_TOKENS) :]  # letters are no special tokens
        return cls(Tokenizer.from_str(json.dumps(trained)))
