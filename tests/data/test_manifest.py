"""A damaged manifest of built data is refused with one clear line."""

import json
from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.manifest import MANIFEST_FILE, BuiltFile, DataManifest, read_manifest


def written(folder: Path) -> dict[str, object]:
    (folder / "text.bin").write_bytes(b"12")
    DataManifest("f", "bpe", 300, 299, 1, 2, {"text.bin": BuiltFile(2, "ab")}).write(folder)
    return json.loads((folder / MANIFEST_FILE).read_text())


def test_a_written_manifest_is_read_back(tmp_path: Path) -> None:
    written(tmp_path)
    assert read_manifest(tmp_path).files == {"text.bin": BuiltFile(2, "ab")}


@pytest.mark.parametrize("key", ["vocab_size", "eod_id", "num_documents", "num_tokens"])
@pytest.mark.parametrize("value", [-1, 1 << 63, 2.5, "3", None, True, [], {}], ids=repr)
def test_a_wrong_value_is_refused_with_its_key(tmp_path: Path, key: str, value: object) -> None:
    content = written(tmp_path) | {key: value}
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=rf"manifest\.json: damaged \({key}: .*--rebuild"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["text.bin", "absent", "null\0byte", "long" * 1000, "text.bin/below"])
def test_a_file_that_is_missing_or_has_another_size_is_refused(tmp_path: Path, name: str) -> None:
    content = written(tmp_path) | {"files": {name: {"num_bytes": 3, "sha256": "ab"}}}
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=r"wanted 3 bytes; build the data again") as refused:
        read_manifest(tmp_path)
    assert len(str(refused.value).splitlines()) == 1
