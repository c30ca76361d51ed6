"""The shipped tiny run, data that stands in for training data, and the words of a printed command."""

import shlex
from pathlib import Path

from megatron_fssdp.data.built_data import BuiltFile, DataManifest

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "gpt_moe_tiny.yaml"


def fake_data(folder: Path, vocab_size: int = 1000, tokenizer: str = "bpe") -> Path:
    folder.mkdir()
    (folder / "text.bin").write_bytes(b"12")
    files = {"text.bin": BuiltFile(2, "")}
    DataManifest("f", tokenizer, vocab_size, vocab_size - 1, 1, 1, files).write(folder)
    return folder


def words_of(output: str) -> list[str]:
    return shlex.split(output.replace("\\\n", " "))
