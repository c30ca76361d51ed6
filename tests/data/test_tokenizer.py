import json

import pytest
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.tokenizer import (
    MIN_VOCAB_SIZE,
    SPECIAL_TOKENS,
    TOKENIZER_FILE,
    VOCAB_FILE,
    WordPieceTokenizer,
    load_pretrained,
    train_bpe,
)
from megatron_fssdp.launch.run_data import build_with_progress
from tests.support.python_process import python_output

TEXTS = ["the quick brown fox jumps over the lazy dog\n" * 20, "def f(x):\n    return x\n" * 20]
SENTENCES = ["The quick brown fox jumps over the lazy dog.", "Returns the size of a file, in bytes."] * 20


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE, 300])
@pytest.mark.parametrize(
    "text", ["the fox", "", "  def f:\n\t", "größe — 漢字 🙂", "\x00\x7f", "a <|endoftext|> b", "x" * 120_000]
)
def test_bpe_round_trips_and_never_uses_end_of_document(vocab_size, text):
    tokenizer = train_bpe(TEXTS, vocab_size)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (vocab_size, vocab_size - 1)
    ids = tokenizer.encode([text])[0].tolist()
    assert max(ids, default=0) < tokenizer.eod_id
    assert len(ids) == len(text.encode()) or vocab_size > MIN_VOCAB_SIZE
    assert Tokenizer.from_str(tokenizer.files[TOKENIZER_FILE]).decode(ids) == text


def test_training_is_deterministic_and_compresses():
    first, second = train_bpe(TEXTS, 320), train_bpe(TEXTS, 320)
    assert first.identity == second.identity
    assert len(first.encode(TEXTS)[0]) < len(TEXTS[0]) / 2
    assert train_bpe(["ab"], 1000).vocab_size == 258  # little text gives a smaller vocabulary


@pytest.mark.timeout(120)
@pytest.mark.parametrize("line", ["x" * 1_500_000, " " * 1_500_000])
def test_a_very_long_line_takes_seconds(line):
    assert train_bpe([line], 500).encode([line])[0].size


@pytest.fixture
def folder(tmp_path):
    """A folder as ``save_pretrained`` writes it. The end of a document is not the last token."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("</s>", "<pad>")])
    tokenizer.save(str(folder / TOKENIZER_FILE))
    return folder


def test_the_end_of_a_document_is_a_usual_token_or_given(folder):
    tokenizer = load_pretrained(str(folder / TOKENIZER_FILE))
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (3, 5)
    assert load_pretrained(str(folder), "<pad>").eod_id == 4
    assert tokenizer.encode(["hello </s>"])[0].max() < 3
    with pytest.raises(ConfigurationError, match="the tokenizer has no token <x> to end a document"):
        load_pretrained(str(folder), "<x>")
    content = json.loads((folder / TOKENIZER_FILE).read_text()) | {"added_tokens": []}
    (folder / TOKENIZER_FILE).write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=r"no token <.endoftext.> .*by --eod-token"):
        load_pretrained(str(folder))


@pytest.mark.timeout(10)  # the hub's client alone would try again for half a minute
def test_a_hub_that_does_not_answer_is_named_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    message = r"127.0.0.1:1 does not answer.*; give a folder with"
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_pretrained("someone/something")
    assert "\n" not in str(caught.value)


def test_what_is_no_such_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"give a folder with tokenizer.json"):
        load_pretrained(str(tmp_path))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigurationError, match="unknown tokenizer 'wordpeice'; did you mean 'wordpiece'"):
        build_with_progress(Console(), [tmp_path / "a.txt"], tmp_path, "wordpeice", 300)
    (tmp_path / TOKENIZER_FILE).write_text(train_bpe(SENTENCES, 300).files[TOKENIZER_FILE])
    with pytest.raises(ConfigurationError, match=r"has no token \[SEP\] to end a document"):
        WordPieceTokenizer.load(tmp_path)


def test_a_saved_tokenizer_loads_as_the_same(tmp_path):
    trained = WordPieceTokenizer.train(SENTENCES, 120)
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


def test_training_is_the_same_in_every_process():
    imported = "from megatron_fssdp.data.tokenizer import WordPieceTokenizer as T"
    code = f"{imported}; print(T.train({SENTENCES!r}, 100).identity)"
    identity = python_output("-c", code).strip()
    assert identity == WordPieceTokenizer.train(SENTENCES, 100).identity
    assert identity != WordPieceTokenizer.train(SENTENCES, 80).identity


def test_special_tokens_have_the_first_ids_and_count_as_text_in_documents():
    tokenizer = WordPieceTokenizer.train(SENTENCES, 120)
    special = (tokenizer.pad, tokenizer.unk, tokenizer.cls, tokenizer.sep, tokenizer.mask)
    assert special == tuple(range(5))
    assert [tokenizer.inv_vocab[index] for index in special] == list(SPECIAL_TOKENS)
    assert tokenizer.eod_id == tokenizer.sep
    assert tokenizer.mask not in tokenizer.encode(["the [MASK] file"])[0].tolist()
    assert tokenizer.encode(["漢"])[0].tolist() == [tokenizer.unk]
