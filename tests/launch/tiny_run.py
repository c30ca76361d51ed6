"""The shipped tiny run, data that stands in for training data, and the words of a printed command."""

import json
import shlex
from dataclasses import asdict

from megatron_fssdp.data.built_data import MANIFEST_FILE, BuiltFile, DataManifest
from tests.support.python_process import ROOT

TINY = ROOT / "configs" / "gpt_moe_tiny.yaml"


def fake_data(folder, vocab_size=1000, tokenizer="bpe"):
    folder.mkdir()
    (folder / "text.bin").write_bytes(b"12")
    files = {"text.bin": BuiltFile(2, "")}
    manifest = DataManifest("f", tokenizer, vocab_size, vocab_size - 1, 1, 1, files)
    (folder / MANIFEST_FILE).write_text(json.dumps(asdict(manifest)))
    return folder


def words_of(output):
    return shlex.split(output.replace("\\\n", " "))
