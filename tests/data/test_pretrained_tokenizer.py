"""Tokenizers in Hugging Face's format."""

import json
import sys
from pathlib import Path

import pytest

from megatron_fssdp.cli.data_command import build_with_progress
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.corpus import corpus_from_paths
from megatron_fssdp.data.indexed_builder import build_data
from megatron_fssdp.data.pretrained_tokenizer import load_pretrained
from megatron_fssdp.data.tokenizer import TOKENIZER_FILE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as ``save_pretrained`` writes it. The end of a document is not the last token."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<end>", "</s>", "<pad>")])
    tokenizer.save(str(folder / TOKENIZER_FILE))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    return folder


def test_data_is_built_with_a_given_tokenizer(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "hello world"}\n{"text": "world </s>"}\n')
    tokenizer = load_pretrained(str(folder))
    manifest, built = build_data(corpus_from_paths([tmp_path / "d.jsonl"]), tmp_path / "data", tokenizer)
    assert built
    assert (manifest.tokenizer, manifest.vocab_size, manifest.eod_id) == ("huggingface", 6, 3)
    assert manifest.num_documents == 2
    again = load_pretrained(str(tmp_path / "data"))
    assert again.identity == tokenizer.identity
    assert not build_data(corpus_from_paths([tmp_path / "d.jsonl"]), tmp_path / "data", again)[1]
    with pytest.raises(ConfigurationError, match="with another tokenizer"):
        build_data(corpus_from_paths([tmp_path / "d.jsonl"]), tmp_path / "data", "bytes")


def test_the_end_of_a_document_is_configured_usual_or_given(folder: Path) -> None:
    assert load_pretrained(str(folder / TOKENIZER_FILE)).eod_id == 3
    assert load_pretrained(str(folder), "<pad>").eod_id == 5
    (folder / "tokenizer_config.json").unlink()
    assert load_pretrained(str(folder)).eod_id == 4
    with pytest.raises(ConfigurationError, match="--eod-token <x>: the tokenizer does not have this token"):
        load_pretrained(str(folder), "<x>")


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"has no tokenizer.json; save the tokenizer"):
        load_pretrained(str(tmp_path))
    (tmp_path / TOKENIZER_FILE).write_text("[]")
    with pytest.raises(ConfigurationError, match="is no tokenizer"):
        load_pretrained(str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # an import fails
    with pytest.raises(ConfigurationError, match="pip install huggingface_hub"):
        load_pretrained("someone/something")


def test_a_misspelled_kind_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigurationError, match="unknown tokenizer 'wordpeice'; did you mean 'wordpiece'"):
        build_with_progress([tmp_path / "a.txt"], tmp_path, "wordpeice", 300)
