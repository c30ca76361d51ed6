"""Builds Megatron's indexed data (``.bin`` and ``.idx``) from a corpus.

The corpus is divided into shards of whole documents. Each finished shard is renamed to its final name, so
that an interrupted build continues after the last finished shard. Then the shards are joined. The manifest is
written last.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.json_records import parse_record
from megatron_fssdp.config.written_files import written_file
from megatron_fssdp.data.corpus import Corpus
from megatron_fssdp.data.documents import documents_of, encode_documents
from megatron_fssdp.data.manifest import (
    DATA_NAME,
    MANIFEST_FILE,
    DataManifest,
    describe_file,
    fingerprint,
    read_manifest,
)
from megatron_fssdp.data.pretrained_tokenizer import PRETRAINED, PretrainedTokenizer
from megatron_fssdp.data.source_file import SourceFile
from megatron_fssdp.data.tokenizer import (
    TOKENIZER_FILE,
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    TokenizerKind,
    check_vocab_size,
)
from megatron_fssdp.data.wordpiece import WordPieceTokenizer

# Called with the name of the current step, the bytes that are done, and the total bytes of the step.
OnProgress = Callable[[str, int, int], None]

_ENCODE_BATCH_BYTES = 4 << 20
_TRAIN_TOKENIZER_BYTES = 64 << 20


@dataclass(frozen=True)
class _FinishedShard:
    num_documents: int
    num_tokens: int
    num_bytes: int


def build_data(
    corpus: Corpus,
    out_dir: Path,
    tokenizer: TokenizerKind | PretrainedTokenizer = "bpe",
    vocab_size: int = 4096,
    num_shards: int = 4,
    rebuild: bool = False,
    on_progress: OnProgress = lambda phase, done, total: None,
) -> tuple[DataManifest, bool]:
    """Tokenize a corpus into Megatron's indexed data.

    Args:
        corpus: Documents to tokenize.
        out_dir: Folder for ``text.bin``, ``text.idx``, the tokenizer and the manifest.
        tokenizer: A tokenizer that exists, or a kind of tokenizer. ``bpe`` trains byte-level byte-pair
            encoding on the corpus. ``bytes`` needs no training. ``wordpiece`` splits the texts into sentences
            and trains BERT's tokenizer on them.
        vocab_size: Vocabulary size of a trained tokenizer, special tokens included.
        num_shards: Number of shards. An interrupted build does not repeat its finished shards.
        rebuild: Whether to replace data that is damaged or was built from other documents or settings.
        on_progress: Function that is called with the current step, bytes done and total bytes.

    Returns:
        The manifest of the data, and whether anything was built. Data that is up to date is not built again.

    Raises:
        ConfigurationError: The folder cannot be written or holds other data, or a document cannot be read.
    """
    if num_shards < 1:
        raise ConfigurationError(f"--shards: got {num_shards}, wanted 1 or more")
    wanted = _wanted(corpus, tokenizer, vocab_size)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with _locked(out_dir):
            if found := _found(out_dir, rebuild):
                if found.fingerprint == wanted:
                    return found, False
                if not rebuild:
                    raise ConfigurationError(
                        f"{out_dir}: holds data that was built from other text or with another tokenizer; "
                        "choose another --out, or replace the data with --rebuild"
                    )
            return _build(corpus, out_dir, tokenizer, vocab_size, num_shards, wanted, on_progress), True
    except OSError as error:
        if error.errno is None:  # not from the system: an import of Megatron may raise such an error
            raise
        raise ConfigurationError(
            f"{error.filename or out_dir}: cannot be written ({error.strerror}); choose another --out"
        ) from None


def _wanted(corpus: Corpus, tokenizer: TokenizerKind | PretrainedTokenizer, vocab_size: int) -> str:
    """Return the fingerprint of the data to build."""
    if isinstance(tokenizer, PretrainedTokenizer):
        return fingerprint(corpus, tokenizer.identity, tokenizer.vocab_size)
    check_vocab_size(tokenizer, vocab_size)
    return fingerprint(corpus, tokenizer, ByteTokenizer.vocab_size if tokenizer == "bytes" else vocab_size)


def _found(out_dir: Path, rebuild: bool) -> DataManifest | None:
    """Return the manifest of existing data, or None. With ``rebuild``, damaged data counts as none."""
    if not (out_dir / MANIFEST_FILE).exists():
        return None
    try:
        return read_manifest(out_dir)
    except ConfigurationError:
        if rebuild:
            return None
        raise


def _build(
    corpus: Corpus,
    out_dir: Path,
    asked: TokenizerKind | PretrainedTokenizer,
    vocab_size: int,
    num_shards: int,
    wanted: str,
    on_progress: OnProgress,
) -> DataManifest:
    work = out_dir / f".building-{wanted[:12]}-{num_shards}"
    for stale in out_dir.glob(".building-*"):
        if stale != work:
            shutil.rmtree(stale)
    work.mkdir(exist_ok=True)
    kind: TokenizerKind = PRETRAINED if isinstance(asked, PretrainedTokenizer) else asked
    tokenizer = (
        asked
        if isinstance(asked, PretrainedTokenizer)
        else _tokenizer(corpus, asked, vocab_size, work, on_progress)
    )
    finished: list[_FinishedShard] = []
    done_bytes = 0
    for number, files in enumerate(_cut(corpus, num_shards)):
        finished.append(
            _write_shard(files, work / _shard_name(number), tokenizer, kind, on_progress, done_bytes, corpus)
        )
        done_bytes += sum(file.num_bytes for file in files)
        on_progress("tokenizing", done_bytes, corpus.num_bytes)
    if not any(shard.num_documents for shard in finished):
        raise ConfigurationError(
            f"{corpus.name}: no file has two or more sentences; give other texts, or Python sources with "
            "docstrings"
        )
    on_progress("joining shards", 0, 1)
    _join(work, len(finished), out_dir, tokenizer)
    tokenizer.save(out_dir)
    names = [f"{DATA_NAME}.bin", f"{DATA_NAME}.idx"] + ([TOKENIZER_FILE] if kind != "bytes" else [])
    manifest = DataManifest(
        fingerprint=wanted,
        tokenizer=kind,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        num_documents=sum(shard.num_documents for shard in finished),
        num_tokens=sum(shard.num_tokens for shard in finished),
        files={name: describe_file(out_dir / name) for name in names},
    )
    manifest.write(out_dir)
    shutil.rmtree(work)
    on_progress("joining shards", 1, 1)
    return manifest


def _tokenizer(
    corpus: Corpus, kind: TokenizerKind, vocab_size: int, work: Path, on_progress: OnProgress
) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer()
    trained = WordPieceTokenizer if kind == "wordpiece" else BpeTokenizer
    finished = work / "tokenizer"
    if not finished.exists():
        partial = work / "tokenizer.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        trained.train(_training_texts(corpus, kind, on_progress), vocab_size).save(partial)
        os.replace(partial, finished)
    return trained.load(finished)


def _training_texts(corpus: Corpus, kind: TokenizerKind, on_progress: OnProgress) -> Iterator[str]:
    """Yield the texts of evenly spaced documents, about ``_TRAIN_TOKENIZER_BYTES`` bytes at most."""
    stride = -(-corpus.num_bytes // _TRAIN_TOKENIZER_BYTES)
    done = 0
    files = corpus.files[::stride]
    total = sum(file.num_bytes for file in files)
    for file in files:
        done += file.num_bytes
        on_progress("training the tokenizer", done, total)
        for texts in documents_of(file, kind):
            yield from texts


def _cut(corpus: Corpus, num_shards: int) -> list[list[SourceFile]]:
    """Divide the documents into contiguous ranges of about equal bytes. No range is empty."""
    shards: list[list[SourceFile]] = [[] for _ in range(num_shards)]
    done = 0
    for file in corpus.files:
        shards[min(done * num_shards // corpus.num_bytes, num_shards - 1)].append(file)
        done += file.num_bytes
    return [shard for shard in shards if shard]


def _write_shard(
    files: list[SourceFile],
    prefix: Path,
    tokenizer: Tokenizer,
    kind: TokenizerKind,
    on_progress: OnProgress,
    done_bytes: int,
    corpus: Corpus,
) -> _FinishedShard:
    record = prefix.with_suffix(".json")
    with contextlib.suppress(FileNotFoundError, ValueError):  # a missing or damaged shard is written again
        return parse_record(_FinishedShard, record.read_bytes())
    partial = Path(f"{prefix}.partial")
    builder = _indexed_builder(f"{partial}.bin", tokenizer)
    num_documents = num_tokens = 0
    for batch in _batches(files):
        for sequences in encode_documents(batch, tokenizer, kind):
            builder.add_document(np.concatenate(sequences), [len(ids) for ids in sequences])
            num_documents += 1
            num_tokens += sum(len(ids) for ids in sequences)
        done_bytes += sum(file.num_bytes for file in batch)
        on_progress("tokenizing", done_bytes, corpus.num_bytes)
    builder.finalize(f"{partial}.idx")
    shard = _FinishedShard(num_documents, num_tokens, os.path.getsize(f"{partial}.bin"))
    for suffix in (".bin", ".idx"):
        os.replace(f"{partial}{suffix}", prefix.with_suffix(suffix))
    with written_file(record, "--out") as partial_record:  # from now on the shard counts as finished
        partial_record.write_text(json.dumps(asdict(shard)))
    return shard


def _batches(files: list[SourceFile]) -> Iterator[list[SourceFile]]:
    batch: list[SourceFile] = []
    for file in files:
        batch.append(file)
        if sum(member.num_bytes for member in batch) >= _ENCODE_BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _join(work: Path, num_shards: int, out_dir: Path, tokenizer: Tokenizer) -> None:
    joined = work / "joined"
    builder = _indexed_builder(f"{joined}.bin", tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's logging warns that no rank is set
        for number in range(num_shards):
            builder.add_index(str(work / _shard_name(number)))
        builder.finalize(f"{joined}.idx")
    (out_dir / MANIFEST_FILE).unlink(missing_ok=True)  # the next lines replace the files that it describes
    for suffix in (".bin", ".idx"):
        os.replace(f"{joined}{suffix}", out_dir / f"{DATA_NAME}{suffix}")


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}"


def _indexed_builder(bin_path: str, tokenizer: Tokenizer) -> Any:
    # Importing Megatron gives warnings about optional packages, ranks and CUDA, which matter only for
    # training.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        return IndexedDatasetBuilder(bin_path, dtype=DType.optimal_dtype(tokenizer.vocab_size))


@contextlib.contextmanager
def _locked(out_dir: Path) -> Iterator[None]:
    """Allow one build at a time in a folder. A second build waits and then finds the finished data."""
    with (out_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
