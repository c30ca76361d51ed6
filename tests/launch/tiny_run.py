"""The shipped tiny run, data that stands in for training data, and arguments of runs and printed commands."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path

from megatron_fssdp.config.run.megatron_arguments import Installation, megatron_arguments
from megatron_fssdp.data.built_data import MANIFEST_FILE, BuiltFile, DataManifest
from megatron_fssdp.launch.run_data import data_arguments
from tests.support.python_process import ROOT

TINY = ROOT / "configs" / "gpt_moe_tiny.yaml"


def fake_data(folder, vocab_size=1000, tokenizer="bpe"):
    folder.mkdir()
    (folder / "text.bin").write_bytes(b"12")
    files = {"text.bin": BuiltFile(2, "")}
    manifest = DataManifest("f", tokenizer, vocab_size, vocab_size - 1, 1, 1, files)
    (folder / MANIFEST_FILE).write_text(json.dumps(asdict(manifest)))
    return folder


def arguments_of(run, machine=None, *, resume=False):
    """Megatron's arguments of a run, by default on this machine, which has no Transformer Engine."""
    data = data_arguments(run, Path("d"), run.data.vocab_size, run.data.vocab_size - 1, 50)
    machine = machine or Installation(run.training.device != "cuda", has_transformer_engine=False)
    return megatron_arguments(run, data, machine, Path("runs/x"), resume=resume)


def words_of(output):
    return shlex.split(output.replace("\\\n", " "))
