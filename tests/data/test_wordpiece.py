"""BERT's tokenizer offers what Megatron's data set needs, and can be trained and loaded anywhere."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.tokenizer import TOKENIZER_FILE, train_bpe
from megatron_fssdp.data.wordpiece import SPECIAL_TOKENS, VOCAB_FILE, WordPieceTokenizer

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
    code = (
        "from megatron_fssdp.data.wordpiece import WordPieceTokenizer as T;"
        f"print(T.train({TEXTS!r}, 100).identity)"
    )
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
