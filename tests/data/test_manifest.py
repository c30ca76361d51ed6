import json
from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.manifest import MANIFEST_FILE, BuiltFile, DataManifest, read_manifest

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
def test_a_manifest_is_read_back_or_refused_with_its_problem(tmp_path: Path, changes, message) -> None:
    (tmp_path / "text.bin").write_bytes(b"12")
    MANIFEST.write(tmp_path)
    if not changes:
        assert read_manifest(tmp_path) == MANIFEST
        return
    content = json.loads((tmp_path / MANIFEST_FILE).read_text()) | changes
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=message):
        read_manifest(tmp_path)
