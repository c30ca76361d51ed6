import json
from dataclasses import asdict

import pytest
from tokenizers import Tokenizer

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data import built_data
from megatron_fssdp.data.built_data import MANIFEST_FILE, BuiltFile, DataManifest, build_data, read_manifest
from megatron_fssdp.data.corpus import Corpus, corpus_from_paths
from megatron_fssdp.data.tokenizer import load_pretrained

pytestmark = pytest.mark.filterwarnings("ignore:Could not determine rank")  # Megatron's logging needs a rank


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(7):
        text = f"Document {number} says hello.\n\nAnd no more.\n" * number  # the first is empty
        (folder / f"{number}.txt").write_text(text)
    return corpus_from_paths([folder])


def sequences(folder):
    """All token sequences of built data, and the numbers of the sequences that begin documents."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(folder / "text"))
    return [dataset[number].tolist() for number in range(len(dataset))], dataset.document_indices.tolist()


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_data_holds_the_documents_in_order(corpus, tmp_path, kind):
    steps, out = [], tmp_path / "out"
    manifest, built = build_data(corpus, out, kind, 265, on_progress=lambda *step: steps.append(step))
    assert built
    assert manifest == read_manifest(out)
    assert (manifest.tokenizer, manifest.vocab_size) == (kind, 257 if kind == "bytes" else 265)
    documents, starts = sequences(out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    texts = [document.text for document in corpus.documents() if document.text]
    assert [tokenizer.decode(document[:-1]) for document in documents] == texts
    assert {document[-1] for document in documents} == {manifest.eod_id}
    assert starts == list(range(manifest.num_documents + 1)) == list(range(7))
    assert manifest.num_tokens == sum(map(len, documents))
    assert steps[-1] == ("tokenizing", corpus.num_bytes, corpus.num_bytes)
    assert {path.name for path in out.iterdir()} == {*manifest.files, MANIFEST_FILE}


def test_existing_data_is_kept_unless_it_is_to_be_rebuilt(corpus, tmp_path):
    out = tmp_path / "out"
    first, _ = build_data(corpus, out, "bytes")
    assert build_data(corpus, out, "bytes") == (first, False)
    with pytest.raises(ConfigurationError, match="another tokenizer; choose another --out"):
        build_data(corpus, out, "bpe", vocab_size=265)
    build_data(corpus, out, "wordpiece", vocab_size=265, rebuild=True)
    assert (out / "vocab.txt").exists()
    given = load_pretrained(str(out), "[SEP]")
    manifest, built = build_data(corpus, out, given, rebuild=True)
    assert built
    assert manifest.tokenizer == "huggingface"
    assert not (out / "vocab.txt").exists()
    (out / "text.bin").write_bytes(b"cut")
    with pytest.raises(ConfigurationError, match=r"text\.bin: got 3 bytes, wanted"):
        build_data(corpus, out, given)
    assert build_data(corpus, out, given, rebuild=True)[1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConfigurationError])
def test_a_build_that_does_not_finish_changes_nothing(corpus, tmp_path, monkeypatch, error):
    out = tmp_path / "out"
    build_data(corpus, out, "bytes")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    read = Corpus.documents

    def failing(corpus):
        yield from list(read(corpus))[:3]
        raise error("stop")

    monkeypatch.setattr(Corpus, "documents", failing)
    with pytest.raises(error):
        build_data(corpus, out, "bpe", vocab_size=265, rebuild=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_only_own_output_is_replaced(corpus, tmp_path):
    text = tmp_path / "text"
    for folder in (text, text / "below"):
        with pytest.raises(ConfigurationError, match="lies in the text's folder"):
            build_data(corpus, folder, "bytes", rebuild=True)
    (tmp_path / "out").mkdir()
    for name, content in (("tokenizer.json", "{}"), ("manifest.json", '{"name": "of another program"}')):
        (tmp_path / "out" / name).write_text(content)
        with pytest.raises(ConfigurationError, match=r"did not write|not of built data"):
            build_data(corpus, tmp_path / "out", "bytes", rebuild=True)
        assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
        (tmp_path / "out" / name).unlink()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="not a folder"):
        build_data(corpus, tmp_path / "file" / "out", "bytes")
    with pytest.raises(ConfigurationError, match="--vocab-size: got 6, wanted 64 or more"):
        build_data(corpus, tmp_path / "out", "wordpiece", 6)
    (tmp_path / "a.py").write_text("x = 1\n" * 50)
    with pytest.raises(ConfigurationError, match="two or more sentences"):
        build_data(corpus_from_paths([tmp_path / "a.py"]), tmp_path / "out", "wordpiece", 200)
    assert not list((tmp_path / "out").iterdir())


def test_sentence_data_has_a_sequence_for_each_sentence(tmp_path, monkeypatch):
    texts = {
        "a.py": '"""Says what it is for. Then says it again."""\nx = 1\n',
        "b.py": '"""Only one sentence here."""\n',
        "c.py": "y = 2\n",
        "d.txt": f"Short words come first. Long {'long ' * 90}ends here.\n\n{'inside ' * 95}ends there.\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(built_data, "MAX_SENTENCE_TOKENS", 50)
    out = tmp_path / "out"
    manifest, _ = build_data(corpus_from_paths(sorted(tmp_path.iterdir())), out, "wordpiece", 200)
    sentences, starts = sequences(out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    told = [tokenizer.decode(sentence) for sentence in sentences[:3]]
    assert told == ["says what it is for.", "then says it again.", "short words come first."]
    assert starts == [0, 2, len(sentences)]
    assert max(map(len, sentences)) == 50
    assert (manifest.num_documents, manifest.num_tokens) == (2, sum(map(len, sentences)))


MANIFEST = DataManifest("f", "bpe", 300, 299, 1, 2, {"text.bin": BuiltFile(2, "ab")})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"vocab_size": -1}, r"manifest\.json: damaged, or not of built data \(vocab_size: "),
        ({"files": {"text.bin": {"num_bytes": 3, "sha256": "ab"}}}, "got 2 bytes, wanted 3 bytes"),
        ({"files": {"null\0byte": {"num_bytes": 3, "sha256": "ab"}}}, "got no file, wanted 3 bytes"),
    ],
)
def test_a_manifest_is_read_back_or_refused_with_its_problem(tmp_path, changes, message):
    (tmp_path / "text.bin").write_bytes(b"12")
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(asdict(MANIFEST) | changes))
    if not changes:
        assert read_manifest(tmp_path) == MANIFEST
        return
    with pytest.raises(ConfigurationError, match=message):
        read_manifest(tmp_path)
