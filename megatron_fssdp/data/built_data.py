"""Builds Megatron's indexed data from a corpus, with a manifest that describes it, and reads the manifest."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import batched, chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.megatron_options import quiet_output
from megatron_fssdp.data.corpus import Corpus, sentences
from megatron_fssdp.data.tokenizer import TOKENIZER_FILES, TRAINED_KINDS, TextTokenizer, train_tokenizer
from megatron_fssdp.files.json_records import Count, parse_record
from megatron_fssdp.files.written_files import written_whole

MANIFEST_FILE = "manifest.json"
DATA_NAME = "text"
MAX_SENTENCE_TOKENS = 256  # Megatron ignores documents that have a sentence of more than 512.

OnProgress = Callable[[str, int, int], None]
"""Takes the name of a step, its bytes that are done, and all its bytes."""

_BATCH = 64
_TRAIN_TOKENIZER_BYTES = 16 << 20
_OUTPUTS = (MANIFEST_FILE, f"{DATA_NAME}.bin", f"{DATA_NAME}.idx", *TOKENIZER_FILES)


@dataclass(frozen=True)
class BuiltFile:
    """One file of built data."""

    num_bytes: Count
    sha256: str  # in hexadecimal


@dataclass(frozen=True)
class DataManifest:
    """The content of ``manifest.json``."""

    fingerprint: str  # a hash of the sources and settings that the data was built from
    tokenizer: str
    vocab_size: Count
    eod_id: Count  # ends a document; the sizes around it count it, too
    num_documents: Count
    num_tokens: Count
    files: dict[str, BuiltFile]  # by name


def read_manifest(folder: Path, complete: bool = True) -> DataManifest:
    """Read the manifest. A damaged one or, if ``complete``, a missing or cut file is a ConfigurationError."""
    path = folder / MANIFEST_FILE
    try:
        manifest = parse_record(DataManifest, path.read_bytes())
    except FileNotFoundError:
        raise ConfigurationError(
            f"{folder}: no built data in this folder (no {MANIFEST_FILE}); "
            f"run `megatron-fssdp data build --out {folder}`"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path}: damaged, or not of built data ({error}); build data in another folder"
        ) from None
    for name, file in manifest.files.items() if complete else ():
        path, wanted = folder / name, f"{file.num_bytes} bytes"
        got = f"{path.stat().st_size} bytes" if os.path.exists(path) else "no file"
        if got != wanted:
            raise ConfigurationError(
                f"{path}: got {got}, wanted {wanted}; build the data again with --rebuild"
            )
    return manifest


def build_data(
    corpus: Corpus,
    out_dir: Path,
    tokenizer: str | TextTokenizer = "bpe",
    vocab_size: int = 4096,
    rebuild: bool = False,
    on_progress: OnProgress = lambda phase, done, total: None,
) -> tuple[DataManifest, bool]:
    """Write Megatron's ``.bin`` and ``.idx`` with tokenizer and manifest into a folder, or change nothing.

    ``tokenizer`` exists, or is one of ``TRAINED_KINDS`` and is trained here. ``vocab_size`` counts special
    tokens, too. Data that is up to date is kept, unless ``rebuild`` replaces all. Return the manifest, and
    whether anything was built. A folder that cannot be written or has other data or files, and an unreadable
    text, are a ConfigurationError.
    """
    if tokenizer == "bytes":
        vocab_size = TRAINED_KINDS["bytes"]
    if isinstance(tokenizer, str) and vocab_size < (least := TRAINED_KINDS[tokenizer]):
        raise ConfigurationError(f"--vocab-size: got {vocab_size}, wanted {least} or more for {tokenizer}")
    around = (folder for folder in corpus.folders if out_dir.resolve().is_relative_to(folder.resolve()))
    if folder := next(around, None):
        raise ConfigurationError(f"--out {out_dir}: lies in the text's folder {folder}; choose another one")
    wanted = _fingerprint(corpus, tokenizer, vocab_size)
    if (out_dir / MANIFEST_FILE).exists():
        manifest = read_manifest(out_dir, complete=not rebuild)
        if not rebuild and manifest.fingerprint != wanted:
            raise ConfigurationError(
                f"{out_dir}: holds data that was built from other text or with another tokenizer; choose "
                "another --out, or replace the data with --rebuild"
            )
        if not rebuild:
            return manifest, False
    elif foreign := [name for name in _OUTPUTS if (out_dir / name).exists()]:
        raise ConfigurationError(
            f"--out {out_dir}: has a {foreign[0]} that `data build` did not write; choose another folder"
        )
    with quiet_output():  # Megatron warns of missing optional packages, ranks and CUDA.
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    is_bert = (tokenizer if isinstance(tokenizer, str) else tokenizer.kind) == "wordpiece"
    with written_whole(out_dir, "--out") as partial:
        if isinstance(tokenizer, str):
            # Evenly spaced documents, so that training takes neither long nor much memory.
            stride = -(-corpus.num_bytes // _TRAIN_TOKENIZER_BYTES)
            documents = _documents(corpus, is_bert, "training the tokenizer", on_progress, stride)
            tokenizer = train_tokenizer(tokenizer, chain.from_iterable(documents), vocab_size)
        number_type = DType.optimal_dtype(tokenizer.vocab_size)
        builder = IndexedDatasetBuilder(str(partial / f"{DATA_NAME}.bin"), dtype=number_type)
        documents = _documents(corpus, is_bert, "tokenizing", on_progress)
        for sequences in _encoded(documents, tokenizer):
            builder.add_document(np.concatenate(sequences), [len(ids) for ids in sequences])
        num_documents = len(builder.document_indices) - 1
        if not num_documents:
            raise ConfigurationError(f"{corpus.name}: too little text; give files of two or more sentences")
        builder.finalize(str(partial / f"{DATA_NAME}.idx"))
        for name, text in tokenizer.files.items():
            (partial / name).write_text(text, encoding="utf-8")
        files = {}
        for path in sorted(partial.iterdir()):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
            files[path.name] = BuiltFile(path.stat().st_size, digest.hexdigest())
        counts = (tokenizer.vocab_size, tokenizer.eod_id, num_documents, sum(builder.sequence_lengths))
        manifest = DataManifest(wanted, tokenizer.kind, *counts, files)
        text = json.dumps(asdict(manifest), indent=2) + "\n"
        (partial / MANIFEST_FILE).write_text(text, encoding="utf-8")
        for name in reversed(_OUTPUTS):  # The new files are complete, so the old data makes way.
            (out_dir / name).unlink(missing_ok=True)
    return manifest, True


def _fingerprint(corpus: Corpus, tokenizer: str | TextTokenizer, vocab_size: int) -> str:
    """Hash everything that decides the data: files with sizes and times, and the tokenizer."""
    made_by = f"{tokenizer} {vocab_size}" if isinstance(tokenizer, str) else tokenizer.identity
    digest = hashlib.sha256(f"{made_by}\n{corpus.json_key}\n".encode())
    for file in corpus.files:
        status = file.stat()
        digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _encoded(documents: Iterable[list[str]], tokenizer: TextTokenizer) -> Iterator[list[NDArray[np.int64]]]:
    """Yield the token sequences of each document, int64 ``[tokens]``: its whole text, or its sentences.

    BERT forms pairs of sentences, so documents with a single one are left out.
    """
    is_bert, cut = tokenizer.kind == "wordpiece", MAX_SENTENCE_TOKENS
    for batch in batched(documents, _BATCH):
        encoded = iter(tokenizer.encode(chain.from_iterable(batch)))
        for texts in batch:
            sequences = [ids for ids in islice(encoded, len(texts)) if len(ids)]
            if is_bert:
                sequences = [ids[at : at + cut] for ids in sequences for at in range(0, len(ids), cut)]
            else:
                sequences = [np.append(ids, tokenizer.eod_id) for ids in sequences]
            if len(sequences) > is_bert:
                yield sequences


def _documents(
    corpus: Corpus, in_sentences: bool, phase: str, on_progress: OnProgress, stride: int = 1
) -> Iterator[list[str]]:
    """Yield the text, or the sentences, of every ``stride``-th document."""
    done = 0
    for number, document in enumerate(corpus.documents()):
        if number % stride == 0:
            yield sentences(document.text, document.is_python) if in_sentences else [document.text]
        done += document.num_bytes
        on_progress(phase, done, corpus.num_bytes)
