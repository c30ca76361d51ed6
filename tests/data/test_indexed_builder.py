import json
from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data import documents as documents_module
from megatron_fssdp.data import indexed_builder
from megatron_fssdp.data.corpus import Corpus, corpus_from_paths
from megatron_fssdp.data.indexed_builder import build_data
from megatron_fssdp.data.manifest import read_manifest
from megatron_fssdp.data.tokenizer import BpeTokenizer
from megatron_fssdp.data.wordpiece import WordPieceTokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Could not determine rank")  # Megatron's logging needs a rank


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(7):
        (folder / f"{number}.txt").write_text(f"document {number} says hello\n" * (number * 3))  # 0 is empty
    return corpus_from_paths([folder])


def documents(folder: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(folder / "text"))
    assert data.document_indices.tolist() == list(range(len(data) + 1))
    return [data[number].tolist() for number in range(len(data))]


@pytest.mark.parametrize("num_shards", [1, 3, 50])
def test_bytes_data_holds_the_documents_in_order(corpus, tmp_path, num_shards):
    manifest, built = build_data(corpus, tmp_path / "out", "bytes", num_shards=num_shards)
    texts = [file.read() for file in corpus.files]
    wanted = [[*text.encode(), 256] for text in texts if text]
    assert built
    assert documents(tmp_path / "out") == wanted
    assert manifest.num_documents == 6
    assert manifest.num_tokens == sum(map(len, wanted))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".lock",
        "manifest.json",
        "text.bin",
        "text.idx",
    ]


def test_bpe_data_equals_the_encoding_of_its_saved_tokenizer(corpus, tmp_path):
    manifest, _ = build_data(corpus, tmp_path / "out", "bpe", vocab_size=265, num_shards=2)
    tokenizer = BpeTokenizer.load(tmp_path / "out")
    found = documents(tmp_path / "out")
    assert [document[-1] for document in found] == [manifest.eod_id] * 6
    assert tokenizer.decode(found[2][:-1]) == corpus.files[3].read()
    assert np.max([max(document) for document in found]) < manifest.vocab_size == 265


def test_a_second_build_does_nothing(corpus, tmp_path):
    first, _ = build_data(corpus, tmp_path / "out", "bytes")
    before = (tmp_path / "out" / "text.bin").stat().st_mtime_ns
    second, built = build_data(corpus, tmp_path / "out", "bytes", rebuild=True)
    assert not built
    assert second == first == read_manifest(tmp_path / "out")
    assert (tmp_path / "out" / "text.bin").stat().st_mtime_ns == before


def test_other_settings_or_damaged_data_need_rebuild(corpus, tmp_path):
    out = tmp_path / "out"
    build_data(corpus, out, "bytes")
    with pytest.raises(ConfigurationError, match="another tokenizer; choose another --out"):
        build_data(corpus, out, "bpe", vocab_size=265)
    manifest, built = build_data(corpus, out, "bpe", vocab_size=265, rebuild=True)
    assert built
    assert manifest.vocab_size == 265
    (out / "text.bin").write_bytes(b"cut")
    with pytest.raises(ConfigurationError, match=r"text\.bin: got 3 bytes, wanted"):
        build_data(corpus, out, "bpe", vocab_size=265)
    assert build_data(corpus, out, "bpe", vocab_size=265, rebuild=True)[1]


def test_an_interrupted_build_goes_on_after_the_last_finished_shard(corpus, tmp_path, monkeypatch):
    written: list[str] = []
    original = indexed_builder._write_shard

    def failing(files, prefix, *rest):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(prefix.name)
        return original(files, prefix, *rest)

    monkeypatch.setattr(indexed_builder, "_write_shard", failing)
    with pytest.raises(KeyboardInterrupt):
        build_data(corpus, tmp_path / "out", "bytes", num_shards=4)
    assert not (tmp_path / "out" / "manifest.json").exists()
    monkeypatch.setattr(indexed_builder, "_write_shard", original)
    work = next((tmp_path / "out").glob(".building-*"))
    before = {path.name: path.stat().st_mtime_ns for path in work.glob("shard-*.bin")}
    assert len(before) == 2
    (work / "shard-00002.partial.bin").write_bytes(b"half")

    read: list[str] = []
    monkeypatch.setattr(
        type(corpus.files[0]), "read", lambda self: read.append(self.path.name) or self.path.read_text()
    )
    build_data(corpus, tmp_path / "out", "bytes", num_shards=4)
    assert 0 < len(read) < len(corpus.files)
    assert documents(tmp_path / "out") == [
        [*file.path.read_bytes(), 256] for file in corpus.files if file.num_bytes
    ]


def test_unwritable_folders_and_invalid_shard_numbers_are_refused(corpus, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        build_data(corpus, tmp_path / "file" / "out", "bytes")
    with pytest.raises(ConfigurationError, match="got 0, wanted 1 or more"):
        build_data(corpus, tmp_path / "out", "bytes", num_shards=0)


def test_the_error_for_missing_data_says_how_to_build_it(tmp_path):
    with pytest.raises(ConfigurationError, match="run `megatron-fssdp data build --out"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(ConfigurationError, match="damaged"):
        read_manifest(tmp_path)


def test_sentence_data_has_a_sequence_for_each_sentence(tmp_path, monkeypatch):
    folder = tmp_path / "text"
    folder.mkdir()
    texts = {
        "a.py": '"""Says what it is for. Then says it again."""\n# a comment of words\nx = 1\n',
        "b.py": '"""Only one sentence here."""\n',
        "c.py": "y = 2\n",
        "d.txt": f"Short words come first. Long {'long ' * 90}ends here.\n\n{'inside ' * 95}ends there.\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(documents_module, "MAX_SENTENCE_TOKENS", 50)
    manifest, _ = build_data(corpus_from_paths([folder]), tmp_path / "out", "wordpiece", 200, num_shards=3)
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokenizer, data = (
        WordPieceTokenizer.load(tmp_path / "out"),
        IndexedDataset(str(tmp_path / "out" / "text")),
    )
    sentences = [tokenizer.decode(data[number].tolist()) for number in range(len(data))]
    first, last = data.document_indices[:2].tolist(), data.document_indices[-1]
    assert manifest.num_documents == len(data.document_indices) - 1 == 2
    assert sentences[first[0] : first[1]] == [
        "says what it is for.",
        "then says it again.",
        "a comment of words",
    ]
    assert sentences[first[1]] == "short words come first."
    assert last == len(data)
    assert max(data.sequence_lengths) == 50
    assert manifest.num_tokens == sum(data.sequence_lengths)
    assert manifest.eod_id == tokenizer.sep


def test_texts_without_sentences_are_refused(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n" * 50)
    with pytest.raises(ConfigurationError, match="two or more sentences"):
        build_data(corpus_from_paths([tmp_path / "a.py"]), tmp_path / "out", "wordpiece", 200)
    assert not (tmp_path / "out" / "manifest.json").exists()
