"""BERT's WordPiece tokenizer: lower-case words and pieces of words, trained without network access.

Training also needs the vocabulary for masking: Megatron's BERT data set asks the tokenizer which tokens begin
a word and which tokens are special.
"""

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.tokenizer import (
    TOKENIZER_FILE,
    TrainedTokenizer,
    check_vocab_size,
    read_tokenizer_file,
)

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCAB_FILE = "vocab.txt"


class WordPieceTokenizer(TrainedTokenizer):
    """WordPiece tokenizer (Devlin et al. 2019) with BERT's normalization. Padding has id 0."""

    def __init__(self, json_text: str) -> None:
        """Load from the JSON text of a saved tokenizer.

        Raises:
            ConfigurationError: The text is not a valid tokenizer, or its first tokens are not BERT's special
                tokens.
        """
        super().__init__(json_text)
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
        """Train a tokenizer on texts.

        Args:
            texts: Sentences to train on.
            vocab_size: Wanted number of token ids, special tokens included. A small amount of text gives
                fewer ids.

        Returns:
            The trained tokenizer.

        Raises:
            ConfigurationError: The vocabulary is too small for special tokens, letters and words.
        """
        check_vocab_size("wordpiece", vocab_size)
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
        tokenizer = _bare_tokenizer(learning.get_vocab())
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
        return cls(tokenizer.to_str())

    @classmethod
    def load(cls, folder: Path) -> "WordPieceTokenizer":
        """Load from a folder that :meth:`save` wrote.

        Raises:
            ConfigurationError: The file is missing, damaged, or belongs to another kind of tokenizer.
        """
        return cls(read_tokenizer_file(folder))

    @property
    def eod_id(self) -> int:
        """Id of ``[SEP]``, which Megatron takes as end-of-document.

        Sentence data does not contain this token.
        """
        return int(self.sep)

    @property
    def unique_identifiers(self) -> "OrderedDict[str, str]":
        """Properties of the tokenizer that decide whether Megatron can reuse its index caches."""
        digest = hashlib.sha256(self._json_text.encode()).hexdigest()
        return OrderedDict({"class": type(self).__qualname__, "sha256": digest})

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, and the two files that Megatron's own tokenizers load.

        These are ``vocab.txt`` (the list of words) and ``tokenizer_config.json``.
        """
        (folder / TOKENIZER_FILE).write_text(self._json_text, encoding="utf-8")
        (folder / VOCAB_FILE).write_text("\n".join(self._words()) + "\n", encoding="utf-8")
        names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        hint = {"tokenizer_class": "PreTrainedTokenizerFast", **dict(zip(names, SPECIAL_TOKENS, strict=True))}
        (folder / "tokenizer_config.json").write_text(json.dumps(hint, indent=2) + "\n", encoding="utf-8")

    def _words(self) -> list[str]:
        return [self.inv_vocab[index] for index in range(self.vocab_size)]


def _bare_tokenizer(words: dict[str, int]) -> Any:
    """Return the ``tokenizers`` library's tokenizer for a vocabulary, with BERT's normalization."""
    from tokenizers import Tokenizer as JsonTokenizer
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    tokenizer = JsonTokenizer(models.WordPiece(vocab=words, unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _letters(texts: Iterable[str], normalizer: Any, most: int) -> list[str]:
    """Return the ``most`` most frequent letters, each as the start of a word and as a part inside a word.

    Rare letters are left out, because they would take the place of words in the vocabulary.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    frequent = sorted(counts, key=lambda letter: (-counts[letter], letter))[: max(most, 1)]
    letters = sorted(letter for letter in frequent if not letter.isspace())
    return letters + [f"##{letter}" for letter in letters]
