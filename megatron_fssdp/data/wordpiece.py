"""BERT's tokenizer: words in lower case and their pieces, trained offline.

Its vocabulary is also what masking needs during a training: Megatron's BERT data set asks it which tokens
begin a word and which are special.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.tokenizer import TOKENIZER_FILE, parse_tokenizer, read_tokenizer_file

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
            ConfigurationError: There is no room for special tokens and letters.
        """
        from tokenizers import Tokenizer as JsonTokenizer
        from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

        tokenizer = JsonTokenizer(models.WordPiece(unk_token=UNK))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            limit_alphabet=max(vocab_size // 4, 1),  # rare scripts would take the place of words
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        if tokenizer.get_vocab_size() > vocab_size:
            raise ConfigurationError(
                f"vocab size: got {vocab_size}, wanted {tokenizer.get_vocab_size()} or more "
                "(special tokens and the letters of this text)"
            )
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
