"""BERT's tokenizer offers what Megatron needs; sentences come from docstrings and paragraphs only."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.tokenizer import TOKENIZER_FILE, train_bpe
from megatron_fssdp.data.wordpiece import MAX_WORDS, SPECIAL_TOKENS, VOCAB_FILE, WordPieceTokenizer, sentences

TEXTS = ["The quick brown fox jumps over the lazy dog.", "Returns the size of a file, in bytes."] * 20


def test_a_saved_tokenizer_loads_as_the_same(tmp_path: Path) -> None:
    trained = WordPieceTokenizer.train(TEXTS, 120)
    (tmp_path / TOKENIZER_FILE).write_text(trained.files[TOKENIZER_FILE])
    loaded = WordPieceTokenizer.load(tmp_path)
    assert loaded.inv_vocab == trained.inv_vocab
    assert loaded.vocab_size == len(loaded.inv_vocab) <= 120
    assert loaded.unique_identifiers == trained.unique_identifiers
    assert loaded.encode(["THE lazy Foxes"])[0].tolist() == trained.encode(["the lazy foxes"])[0].tolist()
    pieces = [loaded.inv_vocab[index] for index in loaded.encode(["theft"])[0].tolist()]
    assert [piece.startswith("##") for piece in pieces] == [False] + [True] * (len(pieces) - 1)
    # A word list alone is enough for Megatron's own BERT tokenizers.
    assert dict(enumerate(trained.files[VOCAB_FILE].split())) == loaded.inv_vocab


def test_training_is_the_same_in_every_process() -> None:
    imported = "from megatron_fssdp.data.wordpiece import WordPieceTokenizer as T"
    code = f"{imported}; print(T.train({TEXTS!r}, 100).identity)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == WordPieceTokenizer.train(TEXTS, 100).identity
    assert other.stdout.strip() != WordPieceTokenizer.train(TEXTS, 80).identity


def test_special_tokens_have_the_first_ids_and_count_as_text_in_documents() -> None:
    tokenizer = WordPieceTokenizer.train(TEXTS, 120)
    special = (tokenizer.pad, tokenizer.unk, tokenizer.cls, tokenizer.sep, tokenizer.mask)
    assert special == tuple(range(5))
    assert [tokenizer.inv_vocab[index] for index in special] == list(SPECIAL_TOKENS)
    assert tokenizer.eod_id == tokenizer.sep
    assert tokenizer.mask not in tokenizer.encode(["the [MASK] file"])[0].tolist()
    assert tokenizer.encode(["漢"])[0].tolist() == [tokenizer.unk]


def test_another_tokenizers_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / TOKENIZER_FILE).write_text(train_bpe(TEXTS, 300).files[TOKENIZER_FILE])
    with pytest.raises(ConfigurationError, match="does not have this token"):
        WordPieceTokenizer.load(tmp_path)


SOURCE = '''\
"""Reads and writes something. It takes two
lines to say so!

    >>> f(1) == 2
    True
"""

# A comment is not read.


def f(x):
    def inner():
        """Does it, e.g. with numbers, as J. Doe wanted. "Really?" Yes, it does."""
    return x  # 0x00 -> START OF HEADING
'''


def test_python_gives_its_docstrings() -> None:
    assert sentences(SOURCE, is_python=True) == [
        "Reads and writes something.",
        "It takes two lines to say so!",
        "Does it, e.g. with numbers, as J. Doe wanted.",
        "Yes, it does.",
    ]
    assert sentences("def f(:\n", is_python=True) == []
    assert len(sentences(Path(textwrap.__file__).read_text(encoding="utf-8"), is_python=True)) > 30


def test_other_texts_are_paragraphs_and_each_sentence_is_kept_once() -> None:
    text = (
        "# A heading of this\n\nFirst words here. Then\nsome more.\n\n===\n\n1 | 2 | 3\n\nFirst words here."
    )
    assert sentences(text, is_python=False) == ["A heading of this", "First words here.", "Then some more."]


def test_long_sentences_are_cut() -> None:
    words = [f"word{'abc'[i % 3]}" for i in range(MAX_WORDS * 2 + 5)]
    found = sentences(" ".join(words), is_python=False)
    assert [len(sentence.split()) for sentence in found] == [MAX_WORDS, MAX_WORDS, 5]
    assert " ".join(found).split() == words
