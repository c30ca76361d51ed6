"""Megatron's text format: one JSON object per line."""

import json
from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data import json_lines
from megatron_fssdp.data.corpus import corpus_from_paths
from megatron_fssdp.data.documents import documents_of
from megatron_fssdp.data.manifest import fingerprint

TEXTS = ["first", "zweiter: größer", "", "third\nwith a line break", "x" * 90, "last"]


def write(path: Path, texts: list[str], key: str = "text", end: str = "\n") -> Path:
    path.write_text("\n".join(json.dumps({"id": 1, key: text}) for text in texts) + end, encoding="utf-8")
    return path


def read(*paths: Path, key: str = "text") -> list[str]:
    corpus = corpus_from_paths(paths, key)
    return [text for file in corpus.files for texts in documents_of(file, "bpe") for text in texts]


@pytest.mark.parametrize("part_bytes", [1, 7, 40, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "", "\n\n"])
def test_every_line_is_one_document_in_order_wherever_the_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int, end: str
) -> None:
    monkeypatch.setattr(json_lines, "PART_BYTES", part_bytes)
    path = write(tmp_path / "d.jsonl", TEXTS, end=end)
    assert read(path) == TEXTS
    parts = corpus_from_paths([path])
    assert parts.num_bytes == path.stat().st_size


def test_folders_may_mix_text_and_json_lines_and_the_key_can_differ(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", ["one", "two"], "content")
    write(tmp_path / "c.json", ["three"], "content")
    (tmp_path / "a.txt").write_text("plain")
    assert read(tmp_path, key="content") == ["plain", "one", "two", "three"]
    assert fingerprint(corpus_from_paths([tmp_path], "content"), "bpe", 300) != fingerprint(
        corpus_from_paths([tmp_path]), "bpe", 300
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: wanted a JSON object"),
        (
            '{"content": "x", "n": 1}',
            "line 2: no text under the key 'text'; keys with text: content; name one",
        ),
        ('{"text": 3}', "keys with text: none"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "a"}\n' + line + '\n{"text": "b"}\n')
    with pytest.raises(ConfigurationError, match=message):
        read(path)
