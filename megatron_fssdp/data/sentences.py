"""Takes the sentences for BERT from a document: of a Python source its docstrings, otherwise all text.

Simple rules leave out doctests, tables and separator lines. They sometimes split a sentence after an
abbreviation.
"""

import ast
import re
from collections.abc import Iterator

MAX_WORDS = 100
"""Maximum number of words of a sentence. The remaining words form the next sentence."""

_MIN_WORDS = 3
_LEAST_LETTERS = 0.7
# Sentences are split after a full stop and before a capital letter, but not after "e.g.", "i.e." or initials.
_SENTENCES = re.compile(r"(?<=[.!?])(?<!\b[A-Za-z]\.)(?<!i\.e\.)(?<!e\.g\.)[\"')\]]*\s+(?=[\"'(`]?[A-Z])")


def sentences(text: str, is_python: bool) -> list[str]:
    """Return the sentences of a document in their order, each on one line and once."""
    blocks = _docstrings(text) if is_python else [text]
    return list(dict.fromkeys(sentence for block in blocks for sentence in _sentences_of(block)))


def _docstrings(source: str) -> list[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]


def _sentences_of(block: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", block):
        if paragraph.lstrip().startswith((">>>", "$ ")):
            continue
        for sentence in _SENTENCES.split(" ".join(paragraph.split())):
            words = sentence.lstrip("-*+# ").split()
            for start in range(0, len(words), MAX_WORDS):
                if _is_sentence(cut := words[start : start + MAX_WORDS]):
                    yield " ".join(cut)


def _is_sentence(words: list[str]) -> bool:
    letters = "".join(words)
    return len(words) >= _MIN_WORDS and sum(map(str.isalpha, letters)) >= _LEAST_LETTERS * len(letters)
