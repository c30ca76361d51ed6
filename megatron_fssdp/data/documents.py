"""What of a file becomes a document of the data, and in which sequences."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.data.corpus import SourceFile
from megatron_fssdp.data.prose import sentences
from megatron_fssdp.data.tokenizer import Tokenizer, TokenizerKind

MAX_SENTENCE_TOKENS = 256
"""Of a sequence of sentence data; Megatron leaves out documents that have one of more than 512."""


def texts_of(file: SourceFile, kind: TokenizerKind) -> list[str]:
    """The texts of a document: its sentences for BERT, all of it otherwise."""
    return sentences(file.read(), file.path.suffix == ".py") if kind == "wordpiece" else [file.read()]


def encode_documents(
    files: Sequence[SourceFile], tokenizer: Tokenizer, kind: TokenizerKind
) -> Iterator[list[NDArray[np.int64]]]:
    """Token ids of documents.

    Args:
        files: The documents.
        tokenizer: What encodes them.
        kind: Its kind.

    Yields:
        A document's sequences: one with end-of-document behind it; or two and more sentences, of which BERT
        makes pairs. Documents with less are left out.
    """
    documents = [texts_of(file, kind) for file in files]
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
