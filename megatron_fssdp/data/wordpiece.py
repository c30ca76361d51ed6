"""BERT's tokenizer: words in lower case and their pieces, trained offline.

Its vocabulary is also what masking needs during a training: Megatron's BERT data set asks it which tokens
begin a word and which are special.
"""

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.tokenizer import (
    TOKENIZER_FILE,
    check_vocab_size,
    parse_tokenizer,
    read_tokenizer_file,
)

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCAB_FILE = "vocab.txt"


class WordPieceTokenizer:
    """WordPiece (Devlin et al. 2019) with BERT's normalization; padding has id 0."""

    def __init__(self, json_text: str) -> None:
        """Load from the JSON text of a saved tokenizer.

        Raises:
            ConfigurationError: It is no tokenizer with BERT's special tokens in the first places.
        """
        self._tokenizer = parse_tokenizer(json_text)
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        words = self._tokenizer.get_vocab(with_added_tokens=True)
        got = [words.get(token) for token in SPECIAL_TOKENS]
        if got != list(range(len(SPECIAL_TOKENS))):
            raise ConfigurationError(
                f"{TOKENIZER_FILE}: {', '.join(SPECIAL_TOKENS)} have ids {got}, wanted the first ones; build "
                "the data with --tokenizer wordpiece"
            )
        self.pad, self.unk, self.cls, self.sep, self.mask = got
        self.inv_vocab: dict[int, str] = {index: word for word, index in words.items()}
        self._json_text = json_text

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "WordPieceTokenizer":
        """Train on texts.

        Args:
            texts: Sentences.
            vocab_size: Ids wanted, special tokens included. Little text gives fewer.

        Raises:
            ConfigurationError: There is no room for special tokens, letters and words.
        """
        check_vocab_size("wordpiece", vocab_size)
        from tokenizers import trainers

        texts = list(texts)
        learning = _bare_tokenizer({UNK: 0})
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            # The trainer numbers letters inside words as it meets them, in the order of a hash table, and
            # breaks ties by these numbers. Numbered in advance, they give the same result each time.
            special_tokens=[*SPECIAL_TOKENS, *_letters(texts, learning.normalizer, vocab_size // 4)],
            limit_alphabet=0,
            show_progress=False,
        )
        learning.train_from_iterator(texts, trainer)
        tokenizer = _bare_tokenizer(learning.get_vocab())
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
        return cls(tokenizer.to_str())

    @classmethod
    def load(cls, folder: Path) -> "WordPieceTokenizer":
        """Load from a folder that :meth:`save` wrote.

        Raises:
            ConfigurationError: The file is missing or damaged, or another tokenizer's.
        """
        return cls(read_tokenizer_file(folder))

    @property
    def eod_id(self) -> int:
        """What Megatron takes for the end of a document; sentence data has no such token in it."""
        return int(self.sep)

    @property
    def unique_identifiers(self) -> "OrderedDict[str, str]":
        """What Megatron's index caches depend on."""
        digest = hashlib.sha256(self._json_text.encode()).hexdigest()
        return OrderedDict({"class": type(self).__qualname__, "sha256": digest})

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Token ids of each text, without special tokens but that for unknown words."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, and what Megatron's own tokenizers load: a list of words and a hint."""
        (folder / TOKENIZER_FILE).write_text(self._json_text, encoding="utf-8")
        (folder / VOCAB_FILE).write_text("\n".join(self._words()) + "\n", encoding="utf-8")
        names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        hint = {"tokenizer_class": "PreTrainedTokenizerFast", **dict(zip(names, SPECIAL_TOKENS, strict=True))}
        (folder / "tokenizer_config.json").write_text(json.dumps(hint, indent=2) + "\n", encoding="utf-8")

    def _words(self) -> list[str]:
        return [self.inv_vocab[index] for index in range(self.vocab_size)]


def _bare_tokenizer(words: dict[str, int]) -> Any:
    """The library's tokenizer of a vocabulary, with BERT's normalization."""
    from tokenizers import Tokenizer as JsonTokenizer
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    tokenizer = JsonTokenizer(models.WordPiece(vocab=words, unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _letters(texts: Iterable[str], normalizer: Any, most: int) -> list[str]:
    """The most frequent letters, at the start of words and inside them; rare scripts would displace words."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    frequent = sorted(counts, key=lambda letter: (-counts[letter], letter))[: max(most, 1)]
    letters = sorted(letter for letter in frequent if not letter.isspace())
    return letters + [f"##{letter}" for letter in letters]
