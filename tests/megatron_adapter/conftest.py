from pathlib import Path

import pytest

from megatron_fssdp.data.corpus import corpus_from_paths
from megatron_fssdp.data.indexed_builder import build_data
from megatron_fssdp.data.manifest import DATA_NAME


@pytest.fixture(scope="session")
def text_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Megatron arguments' data prefix: this test suite's own text, as bytes."""
    folder = tmp_path_factory.mktemp("text")
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    build_data(corpus_from_paths(sources), folder, tokenizer="bytes", num_shards=1)
    return folder / DATA_NAME
