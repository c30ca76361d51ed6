"""Turns files into tokenized documents, as whole texts or as sentences."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.data.prose import sentences
from megatron_fssdp.data.source_file import SourceFile
from megatron_fssdp.data.tokenizer import Tokenizer, TokenizerKind

MAX_SENTENCE_TOKENS = 256
"""Maximum tokens of a sentence. Megatron ignores documents that have a sentence of more than 512 tokens."""


def documents_of(file: SourceFile, kind: TokenizerKind) -> Iterator[list[str]]:
    """Yield the texts of each document of a file: sentences for BERT (``wordpiece``), or the whole text."""
    for text in file.documents():
        yield sentences(text, file.path.suffix == ".py") if kind == "wordpiece" else [text]


def encode_documents(
    files: Sequence[SourceFile], tokenizer: Tokenizer, kind: TokenizerKind
) -> Iterator[list[NDArray[np.int64]]]:
    """Tokenize documents.

    Args:
        files: Files of the documents.
        tokenizer: Tokenizer that encodes the texts.
        kind: Kind of the tokenizer.

    Yields:
        The token sequences of one document, each int64 ``[tokens]``. With ``wordpiece`` these are its
        sentences, of which BERT forms pairs. Otherwise it is the whole text, followed by end-of-document.
        Documents without text are left out, and with ``wordpiece`` also documents of a single sentence.
    """
    documents = [texts for file in files for texts in documents_of(file, kind)]
    encoded = iter(tokenizer.encode([text for texts in documents for text in texts]))
    for texts in documents:
        sequences = [ids for ids in (next(encoded) for _ in texts) if len(ids)]
        if kind == "wordpiece":
            sequences = [part for ids in sequences for part in _cut(ids)]
        else:
            sequences = [np.append(ids, tokenizer.eod_id) for ids in sequences]
        if len(sequences) >= (2 if kind == "wordpiece" else 1):
            yield sequences


def _cut(ids: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [ids[at : at + MAX_SENTENCE_TOKENS] for at in range(0, len(ids), MAX_SENTENCE_TOKENS)]
