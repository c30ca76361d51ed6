import argparse
import json.decoder
import pathlib
import textwrap
import typing
from pathlib import Path

import pytest

from megatron_fssdp.data.built_data import DATA_NAME, build_data
from megatron_fssdp.data.corpus import corpus_from_paths

SOURCES = [Path(module.__file__) for module in (argparse, json.decoder, pathlib, textwrap, typing)]


@pytest.fixture(scope="session")
def text_data(tmp_path_factory):
    """Prefix of Megatron's indexed data: some sources of the standard library, tokenized as bytes."""
    folder = tmp_path_factory.mktemp("text")
    build_data(corpus_from_paths(SOURCES), folder, tokenizer="bytes")
    return folder / DATA_NAME


@pytest.fixture(scope="session")
def sentence_data(tmp_path_factory):
    """Prefix of Megatron's indexed data for BERT: the sentences of those sources, in WordPiece."""
    folder = tmp_path_factory.mktemp("sentences")
    build_data(corpus_from_paths(SOURCES), folder, tokenizer="wordpiece", vocab_size=600)
    return folder / DATA_NAME
