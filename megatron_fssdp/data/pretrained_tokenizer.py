"""Tokenizers that exist already, in Hugging Face's format: by a name on the hub, a folder or a file."""

import hashlib
import json
from pathlib import Path
from typing import Literal

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.tokenizer import EOD_TOKEN, TOKENIZER_FILE, TrainedTokenizer

PRETRAINED: Literal["huggingface"] = "huggingface"
"""Kind of these tokenizers in manifests."""

_CONFIG_FILE = "tokenizer_config.json"
_USUAL_ENDS = (EOD_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class PretrainedTokenizer(TrainedTokenizer):
    """A tokenizer that is not trained on the corpus.

    Args:
        json_text: Text of its ``tokenizer.json``.
        eod_token: Token that ends a document.

    Raises:
        ConfigurationError: The text is no valid tokenizer, or it does not have the token.
    """

    def __init__(self, json_text: str, eod_token: str) -> None:
        super().__init__(json_text)
        self._json_text, self._eod_token = json_text, eod_token
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if eod_token not in ids:
            raise ConfigurationError(
                f"--eod-token {eod_token}: the tokenizer does not have this token; name one of its own"
            )
        self.eod_id: int = ids[eod_token]
        self.vocab_size = max(ids.values()) + 1  # numbers may have gaps

    @property
    def identity(self) -> str:
        """Text that decides the token ids."""
        return f"{PRETRAINED} {hashlib.sha256(self._json_text.encode()).hexdigest()} {self._eod_token}"

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, and ``tokenizer_config.json`` for loading with ``transformers``."""
        (folder / TOKENIZER_FILE).write_text(self._json_text, encoding="utf-8")
        hint = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self._eod_token}
        (folder / _CONFIG_FILE).write_text(json.dumps(hint, indent=2) + "\n", encoding="utf-8")


def load_pretrained(name: str, eod_token: str | None = None) -> PretrainedTokenizer:
    """Load a tokenizer.

    Args:
        name: A file ``tokenizer.json``, a folder that has it, or a name on the Hugging Face hub.
        eod_token: Token that ends a document. Default: the end-of-sequence token of
            ``tokenizer_config.json`` beside the file, or a usual one that the tokenizer has.

    Raises:
        ConfigurationError: The tokenizer does not exist or is damaged, the hub cannot be reached, or no token
            that ends a document is known.
    """
    path = Path(name)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        if path.is_dir():
            raise ConfigurationError(
                f"--tokenizer {name}: has no {TOKENIZER_FILE}; save the tokenizer there with save_pretrained "
                "of transformers' fast tokenizers"
            )
        file = _downloaded(name, TOKENIZER_FILE)
        _downloaded(name, _CONFIG_FILE, required=False)
    try:
        text = file.read_text(encoding="utf-8")
        tokens = {entry["content"] for entry in json.loads(text).get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"--tokenizer {name}: {file} is no tokenizer ({error})") from None
    known = [_configured_end(file.with_name(_CONFIG_FILE)), *(end for end in _USUAL_ENDS if end in tokens)]
    eod = eod_token or next((end for end in known if end), None)
    if eod is None:
        raise ConfigurationError(
            f"--tokenizer {name}: it does not say which token ends a document; name it with --eod-token"
        )
    return PretrainedTokenizer(text, eod)


def _configured_end(file: Path) -> str | None:
    """Return the end-of-sequence token that ``tokenizer_config.json`` names, or None."""
    try:
        token = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _downloaded(name: str, file: str, *, required: bool = True) -> Path:
    """Return the local copy of a file of the hub. The hub's own cache keeps it."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ConfigurationError(
            f"--tokenizer {name}: is no file or folder, and the package huggingface_hub, which downloads "
            "tokenizers, is not installed; install it with `pip install huggingface_hub`"
        ) from None
    try:
        return Path(hf_hub_download(name, file))
    except Exception as error:  # its errors have many types: no network, no such name, no access
        if not required:
            return Path(file)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigurationError(
            f"--tokenizer {name}: is none of bpe, bytes and wordpiece, no file or folder, and the Hugging "
            f"Face hub did not give it ({reason}); check the name, or give a folder with {TOKENIZER_FILE}"
        ) from None
