import json
import textwrap
from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.corpus import MAX_WORDS, corpus_from_paths, default_corpus, sentences


def texts(*paths, key="text"):
    return [document.text for document in corpus_from_paths(paths, key).documents()]


def test_default_corpus_is_the_standard_library_without_packages_and_tests():
    names = [file.as_posix() for file in default_corpus().files]
    assert any(name.endswith("/argparse.py") for name in names)
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not any("site-packages" in name or "/tests/" in name or "/test/" in name for name in names)
    assert all(document.is_python and document.text is not None for document in default_corpus().documents())


def test_folders_give_their_text_files_in_order_and_named_files_are_always_read(tmp_path):
    for name in ("b.txt", "a.md", "c.bin", "sub/d.py", ".hidden/e.txt"):
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    odd = tmp_path / "odd.data"
    odd.write_text("odd")
    names = texts(odd, tmp_path / "text", tmp_path / "text" / "b.txt")
    assert names == ["odd", "a.md", "b.txt", "sub/d.py"]


def test_each_line_of_a_json_file_is_a_document(tmp_path):
    wanted = ["first", "zweiter: größer", "", "third\nwith a line break"]
    lines = [json.dumps({"id": 1, "content": text}) for text in wanted]
    (tmp_path / "b.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    (tmp_path / "a.txt").write_text("plain")
    assert texts(tmp_path, key="content") == ["plain", *wanted]
    assert sum(document.num_bytes for document in corpus_from_paths([tmp_path], "content").documents()) > 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "no such file or folder"),
        ("empty.txt", b"", "no text found"),
        ("latin.txt", b"caf\xe9", r"latin\.txt: cannot be read .* convert the file"),
        ("a.jsonl", b'{"text": "a"}\n{', "line 2: wanted a JSON object with text under the key 'text'"),
        ("a.json", b"[1]", "line 1"),
        ("a.json", b'{"content": "x"}', "line 1: .* name another key with --json-key"),
        ("a.json", b'{"text": 3}', "line 1"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        texts(tmp_path / name)


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


def test_python_gives_its_docstrings():
    assert sentences(SOURCE, is_python=True) == [
        "Reads and writes something.",
        "It takes two lines to say so!",
        "Does it, e.g. with numbers, as J. Doe wanted.",
        "Yes, it does.",
    ]
    assert sentences("def f(:\n", is_python=True) == []
    assert len(sentences(Path(textwrap.__file__).read_text(encoding="utf-8"), is_python=True)) > 30


def test_other_texts_are_paragraphs_and_each_sentence_is_kept_once():
    text = (
        "# A heading of this\n\nFirst words here. Then\nsome more.\n\n===\n\n1 | 2 | 3\n\nFirst words here."
    )
    assert sentences(text, is_python=False) == ["A heading of this", "First words here.", "Then some more."]


def test_long_sentences_are_cut():
    words = [f"word{'abc'[i % 3]}" for i in range(MAX_WORDS * 2 + 5)]
    parts = sentences(" ".join(words), is_python=False)
    assert [len(sentence.split()) for sentence in parts] == [MAX_WORDS, MAX_WORDS, 5]
    assert " ".join(parts).split() == words
