"""Builds Megatron's indexed data from a corpus, with a manifest that describes it, and reads the manifest."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import batched, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.json_records import Count, parse_record
from megatron_fssdp.config.quiet_output import quiet_output
from megatron_fssdp.config.written_files import written_whole
from megatron_fssdp.data.corpus import Corpus, Document, sentences
from megatron_fssdp.data.tokenizer import (
    MIN_VOCAB_SIZE,
    TOKENIZER_FILES,
    TextTokenizer,
    WordPieceTokenizer,
    train_bpe,
)

MANIFEST_FILE = "manifest.json"
DATA_NAME = "text"

OnProgress = Callable[[str, int, int], None]
"""Takes the name of a step, its bytes that are done, and all its bytes."""

MAX_SENTENCE_TOKENS = 256
"""Megatron ignores documents that have a sentence of more than 512 tokens."""

_BATCH = 64
_TRAIN_TOKENIZER_BYTES = 16 << 20
_LEAST_VOCABULARY = {"bpe": MIN_VOCAB_SIZE, "wordpiece": 64}
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

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` into a folder."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")


def read_manifest(folder: Path, complete: bool = True) -> DataManifest:
    """Read the manifest of built data, or raise a ConfigurationError.

    ``complete``: its files must exist with the right sizes.
    """
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
        found = None
        with contextlib.suppress(OSError, ValueError):  # a name with a null byte, or too long a name
            found = (folder / name).stat().st_size
        if found != file.num_bytes:
            raise ConfigurationError(
                f"{folder / name}: got {'no file' if found is None else f'{found} bytes'}, wanted "
                f"{file.num_bytes} bytes; build the data again with --rebuild"
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
    whether anything was built.

    Raises:
        ConfigurationError: The folder cannot be written or has other data or files, or a text is unreadable.
    """
    if tokenizer == "bytes":
        vocab_size = MIN_VOCAB_SIZE
    if isinstance(tokenizer, str) and vocab_size < (least := _LEAST_VOCABULARY.get(tokenizer, 0)):
        raise ConfigurationError(f"--vocab-size: got {vocab_size}, wanted {least} or more for {tokenizer}")
    _refuse_foreign_files(corpus, out_dir)
    wanted = _fingerprint(corpus, tokenizer, vocab_size)
    if (out_dir / MANIFEST_FILE).exists():
        found = read_manifest(out_dir, complete=not rebuild)
        if not rebuild and found.fingerprint == wanted:
            return found, False
        if not rebuild:
            raise ConfigurationError(
                f"{out_dir}: holds data that was built from other text or with another tokenizer; choose "
                "another --out, or replace the data with --rebuild"
            )
    with quiet_output():  # Megatron warns of missing optional packages, ranks and CUDA.
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    with written_whole(out_dir, "--out") as partial:
        if isinstance(tokenizer, str):
            tokenizer = _trained(corpus, tokenizer, vocab_size, on_progress)
        number_type = DType.optimal_dtype(tokenizer.vocab_size)
        builder = IndexedDatasetBuilder(str(partial / f"{DATA_NAME}.bin"), dtype=number_type)
        for sequences in _encoded(corpus, tokenizer, on_progress):
            builder.add_document(np.concatenate(sequences), [len(ids) for ids in sequences])
        num_documents = len(builder.document_indices) - 1
        if not num_documents:
            raise ConfigurationError(f"{corpus.name}: no file has two or more sentences; give other texts")
        builder.finalize(str(partial / f"{DATA_NAME}.idx"))
        for name, text in tokenizer.files.items():
            (partial / name).write_text(text, encoding="utf-8")
        files = {path.name: _described(path) for path in sorted(partial.iterdir())}
        counts = (tokenizer.vocab_size, tokenizer.eod_id, num_documents, sum(builder.sequence_lengths))
        manifest = DataManifest(wanted, tokenizer.kind, *counts, files)
        manifest.write(partial)
        for name in reversed(_OUTPUTS):  # The new files are complete, so the old data makes way.
            (out_dir / name).unlink(missing_ok=True)
    return manifest, True


def _described(path: Path) -> BuiltFile:
    with path.open("rb") as file:
        return BuiltFile(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _refuse_foreign_files(corpus: Corpus, out_dir: Path) -> None:
    for folder in corpus.folders:
        if out_dir.resolve().is_relative_to(folder.resolve()):
            raise ConfigurationError(
                f"--out {out_dir}: lies in the text's folder {folder}; choose another one"
            )
    for name in () if (out_dir / MANIFEST_FILE).exists() else _OUTPUTS:
        if (out_dir / name).exists():
            raise ConfigurationError(
                f"--out {out_dir}: has a {name} that `data build` did not write; choose another folder"
            )


def _fingerprint(corpus: Corpus, tokenizer: str | TextTokenizer, vocab_size: int) -> str:
    """Hash everything that decides the data: files with sizes and times, and the tokenizer."""
    made_by = f"{tokenizer} {vocab_size}" if isinstance(tokenizer, str) else tokenizer.identity
    digest = hashlib.sha256(f"{made_by}\n{corpus.json_key}\n".encode())
    for file in corpus.files:
        status = file.stat()
        digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _trained(corpus: Corpus, kind: str, vocab_size: int, on_progress: OnProgress) -> TextTokenizer:
    """Train on evenly spaced documents, which takes neither long nor much memory."""
    if kind == "bytes":
        return train_bpe((), vocab_size)
    stride = -(-corpus.num_bytes // _TRAIN_TOKENIZER_BYTES)
    followed = _followed(corpus, "training the tokenizer", on_progress)
    texts = (text for one in islice(followed, 0, None, stride) for text in _texts_of(one, kind))
    train = WordPieceTokenizer.train if kind == "wordpiece" else train_bpe
    return train(texts, vocab_size)


def _encoded(
    corpus: Corpus, tokenizer: TextTokenizer, on_progress: OnProgress
) -> Iterator[list[NDArray[np.int64]]]:
    """Yield the token sequences of each document, int64 ``[tokens]``: its whole text, or its sentences.

    BERT forms pairs of sentences, so documents with a single one are left out.
    """
    is_bert, cut = tokenizer.kind == "wordpiece", MAX_SENTENCE_TOKENS
    for batch in batched(_followed(corpus, "tokenizing", on_progress), _BATCH):
        texts = [_texts_of(document, tokenizer.kind) for document in batch]
        encoded = iter(tokenizer.encode([text for of_document in texts for text in of_document]))
        for of_document in texts:
            found = [ids for ids in (next(encoded) for _ in of_document) if len(ids)]
            if is_bert:
                found = [ids[at : at + cut] for ids in found for at in range(0, len(ids), cut)]
            else:
                found = [np.append(ids, tokenizer.eod_id) for ids in found]
            if len(found) > is_bert:
                yield found


def _texts_of(document: Document, kind: str) -> list[str]:
    return sentences(document.text, document.is_python) if kind == "wordpiece" else [document.text]


def _followed(corpus: Corpus, phase: str, on_progress: OnProgress) -> Iterator[Document]:
    done = 0
    for document in corpus.documents():
        yield document
        done += document.num_bytes
        on_progress(phase, done, corpus.num_bytes)
