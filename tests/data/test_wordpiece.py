"""BERT's tokenizer offers what Megatron's data set needs, and can be trained and loaded anywhere."""

import json
from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.tokenizer import BpeTokenizer
from megatron_fssdp.data.wordpiece import MASK, SPECIAL_TOKENS, VOCAB_FILE, WordPieceTokenizer

TEXTS = ["The quick brown fox jumps over the lazy dog.", "Returns the size of a file, in bytes."] * 20


def test_a_saved_tokenizer_loads_as_the_same(tmp_path: Path) -> None:
    trained = WordPieceTokenizer.train(TEXTS, 120)
    trained.save(tmp_path)
    loaded = WordPieceTokenizer.load(tmp_path)
    assert loaded.inv_vocab == trained.inv_vocab
    assert loaded.vocab_size == len(loaded.inv_vocab) <= 120
    assert loaded.unique_identifiers == trained.unique_identifiers
    ids = loaded.encode(["THE lazy Foxes"])[0].tolist()
    assert ids == trained.encode(["the lazy foxes"])[0].tolist()
    assert loaded.decode(ids) == "the lazy foxes"
    # A word list alone is enough for Megatron's own BERT tokenizers.
    words = (tmp_path / VOCAB_FILE).read_text(encoding="utf-8").split()
    assert dict(enumerate(words)) == loaded.inv_vocab
    hint = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert hint["mask_token"] == MASK


def test_training_is_deterministic() -> None:
    first, again = (WordPieceTokenizer.train(TEXTS, 100) for _ in range(2))
    assert first.inv_vocab == again.inv_vocab
    assert first.unique_identifiers == again.unique_identifiers
    other = WordPieceTokenizer.train(TEXTS, 80)
    assert other.unique_identifiers != first.unique_identifiers


def test_special_tokens_have_the_first_ids_and_count_as_text_in_documents() -> None:
    tokenizer = WordPieceTokenizer.train(TEXTS, 120)
    special = (tokenizer.pad, tokenizer.unk, tokenizer.cls, tokenizer.sep, tokenizer.mask)
    assert special == tuple(range(5))
    assert [tokenizer.inv_vocab[index] for index in special] == list(SPECIAL_TOKENS)
    ids = tokenizer.encode([f"the {MASK} file"])[0].tolist()
    assert tokenizer.mask not in ids
    assert tokenizer.encode(["漢"])[0].tolist() == [tokenizer.unk]


def test_pieces_inside_words_are_marked() -> None:
    tokenizer = WordPieceTokenizer.train(TEXTS, 100)
    pieces = [tokenizer.inv_vocab[index] for index in tokenizer.encode(["theft"])[0].tolist()]
    assert len(pieces) > 1
    assert not pieces[0].startswith("##")
    assert all(piece.startswith("##") for piece in pieces[1:])


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--vocab-size: got 6, wanted 64 or more"):
        WordPieceTokenizer.train(TEXTS, 6)


def test_another_tokenizers_file_is_refused(tmp_path: Path) -> None:
    BpeTokenizer.train(TEXTS, 300).save(tmp_path)
    with pytest.raises(ConfigurationError, match="--tokenizer wordpiece"):
        WordPieceTokenizer.load(tmp_path)
