import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.corpus import corpus_from_paths, default_corpus


def test_default_corpus_is_the_standard_library_without_packages_and_tests():
    corpus = default_corpus()
    names = [file.path.as_posix() for file in corpus.files]
    assert any(name.endswith("/argparse.py") for name in names)
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not any("site-packages" in name or "/tests/" in name or "/test/" in name for name in names)
    assert corpus.num_bytes > 1_000_000
    assert names == [file.path.as_posix() for file in default_corpus().files]


def test_folders_give_their_text_files_in_order_and_named_files_are_always_read(tmp_path):
    for name in ("b.txt", "a.md", "c.bin", "sub/d.py", ".hidden/e.txt"):
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    odd = tmp_path / "odd.data"
    odd.write_text("odd")
    corpus = corpus_from_paths([odd, tmp_path / "text", tmp_path / "text" / "b.txt"])
    assert [file.path.name for file in corpus.files] == ["odd.data", "a.md", "b.txt", "d.py"]
    assert corpus.files[0].read() == "odd"


def test_missing_and_empty_sources_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file or folder"):
        corpus_from_paths([tmp_path / "nothing"])
    with pytest.raises(ConfigurationError, match="no text found"):
        corpus_from_paths([tmp_path])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigurationError, match="no text found"):
        corpus_from_paths([tmp_path / "empty.txt"])


def test_unreadable_documents_are_named(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ConfigurationError, match=r"latin\.txt: not UTF-8 text \(byte 3\)"):
        corpus_from_paths([path]).files[0].read()
    file = corpus_from_paths([path]).files[0]
    path.unlink()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        file.read()
