import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.tokenizer import EOD_TOKEN, BpeTokenizer, ByteTokenizer

TEXTS = ["the quick brown fox jumps over the lazy dog\n" * 20, "def f(x):\n    return x\n" * 20]


def test_byte_tokens_cover_all_values_except_end_of_document():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(["aé\x00", ""])
    assert ids[0].tolist() == [97, 0xC3, 0xA9, 0]
    assert len(ids[1]) == 0
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)


@pytest.mark.parametrize(
    "text", ["the fox", "  def f:\n\t", "größe — 漢字 🙂", "\x00\x7f", f"a {EOD_TOKEN} b"]
)
def test_bpe_round_trips_and_never_uses_end_of_document(text, tmp_path):
    BpeTokenizer.train(TEXTS, 300).save(tmp_path)
    tokenizer = BpeTokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 300
    assert tokenizer.eod_id == 299
    ids = tokenizer.encode([text])[0].tolist()
    assert max(ids) < tokenizer.eod_id
    assert tokenizer.decode(ids) == text


def test_training_is_deterministic_and_compresses():
    first, second = BpeTokenizer.train(TEXTS, 320), BpeTokenizer.train(TEXTS, 320)
    assert first.encode(TEXTS)[0].tolist() == second.encode(TEXTS)[0].tolist()
    assert len(first.encode(TEXTS)[0]) < len(TEXTS[0]) / 2


def test_little_text_gives_a_smaller_vocabulary():
    tokenizer = BpeTokenizer.train(["ab"], 1000)
    assert tokenizer.vocab_size == 258
    assert tokenizer.eod_id == 257


def test_invalid_vocabularies_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="got 256, wanted 257 or more"):
        BpeTokenizer.train(TEXTS, 256)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        BpeTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigurationError, match="damaged"):
        BpeTokenizer.load(tmp_path)
