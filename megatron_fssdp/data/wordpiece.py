"""What BERT trains on: the sentences of a document, and WordPiece tokens."""

import ast
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.tokenizer import MAX_WORD, TOKENIZER_FILE, TextTokenizer

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCAB_FILE = "vocab.txt"
"""List of words, which Megatron's own tokenizers load."""

MAX_WORDS = 100
"""Most words of a sentence. The remaining words form the next sentence."""

_MIN_WORDS = 3
_LEAST_LETTERS = 0.7
# Sentences are split after a full stop and before a capital letter, but not after "e.g.", "i.e." or initials.
_SENTENCES = re.compile(r"(?<=[.!?])(?<!\b[A-Za-z]\.)(?<!i\.e\.)(?<!e\.g\.)[\"')\]]*\s+(?=[\"'(`]?[A-Z])")


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
    cut = pre_tokenizers.FixedLength(MAX_WORD)
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), cut])
    library.decoder = decoders.WordPiece()
    return library


def _letters(texts: Iterable[str], normalizer: Any, most: int) -> list[str]:
    """Return the most frequent letters, each as the start of a word and as a part inside a word."""
    counts = Counter(letter for text in texts for letter in normalizer.normalize_str(text))
    frequent = sorted(counts, key=lambda letter: (-counts[letter], letter))[:most]
    letters = sorted(letter for letter in frequent if not letter.isspace())
    return letters + [f"##{letter}" for letter in letters]


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
            words = sentence.lstrip("-*+# ").split()
            for start in range(0, len(words), MAX_WORDS):
                if _is_sentence(cut := words[start : start + MAX_WORDS]):
                    yield " ".join(cut)


def _is_sentence(words: list[str]) -> bool:
    letters = "".join(words)
    return len(words) >= _MIN_WORDS and sum(map(str.isalpha, letters)) >= _LEAST_LETTERS * len(letters)
