"""Extracts sentences from files: from docstrings and comments of Python sources, and from other texts.

BERT trains on these sentences. A file is one document, and its sentences stay in order. Simple rules find
clear sentences and leave out code, tables and separator lines. The rules sometimes split a sentence after an
abbreviation.
"""

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator

MAX_WORDS = 100
"""Maximum number of words of a sentence. The remaining words form the next sentence."""

_MIN_WORDS = 3
_LEAST_LETTERS = 0.7
_PARAGRAPHS = re.compile(r"\n\s*\n")
# Sentences are split after a full stop and before a capital letter, but not after "e.g.", "i.e." or initials.
_SENTENCES = re.compile(r"(?<=[.!?])(?<!\b[A-Za-z]\.)(?<!i\.e\.)(?<!e\.g\.)[\"')\]]*\s+(?=[\"'(`]?[A-Z])")
_CODE_SIGNS = re.compile(r"[=(\[{]")
_LIST_ITEM = re.compile(r"\n\s*(?=(?:[-*+]|\d+[.)])\s)")
_BULLET = re.compile(r"^(?:[-*+#]+|\d+[.)])\s+")
_ENCODING = re.compile(r"coding[:=]|^!|^(?:type|noqa|pragma|pylint|fmt|mypy)\b")


def sentences(text: str, is_python: bool) -> list[str]:
    """Extract all sentences of a document.

    Args:
        text: Text of the document.
        is_python: Whether the document is Python source, of which only docstrings and comments are used.

    Returns:
        Sentences in their order, each on one line with at most ``MAX_WORDS`` words. A sentence that occurs
        several times, for example in a licence, is returned once.
    """
    blocks = _python_blocks(text) if is_python else [text]
    found = (sentence for block in blocks for sentence in _sentences_of(block))
    return list(dict.fromkeys(found))


def _python_blocks(source: str) -> list[str]:
    """Return docstrings and blocks of comments, in the order of their lines.

    A file with a syntax error gives only the comments before the error.
    """
    placed = [*_docstrings(source), *_comments(source)]
    return [text for _, text in sorted(placed, key=lambda block: block[0])]


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield node.body[0].lineno, inspect.cleandoc(text)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments with their line numbers. Comments alone on adjacent lines in one column are joined."""
    first = last = column = -1
    lines: list[str] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type != tokenize.COMMENT:
                continue
            row, start = token.start
            if lines and (row != last + 1 or start != column or token.line[:start].strip()):
                yield first, "\n".join(lines)
                lines = []
            first, last, column = (first if lines else row), row, start
            text = token.string.lstrip("#").removeprefix(" ").removeprefix(":")
            # A line without brackets and assignments counts as words, even if it is valid Python.
            lines.append("" if _CODE_SIGNS.search(text) and _is_code(text) else text)
    except (tokenize.TokenError, SyntaxError, ValueError):  # odd characters raise ValueError
        pass
    if lines:
        yield first, "\n".join(lines)


def _sentences_of(block: str) -> Iterator[str]:
    for paragraph in _PARAGRAPHS.split(block.expandtabs()):
        if _is_code(paragraph):
            continue
        for item in _LIST_ITEM.split(paragraph):
            for piece in _SENTENCES.split(" ".join(item.split())):
                words = _BULLET.sub("", piece).split()
                for start in range(0, len(words), MAX_WORDS):
                    if _is_sentence(cut := words[start : start + MAX_WORDS]):
                        yield " ".join(cut)


def _is_code(paragraph: str) -> bool:
    """Whether a paragraph is a doctest, a special comment, or valid Python (code that is commented out)."""
    if paragraph.lstrip().startswith((">>>", "...", "$ ")) or _ENCODING.search(paragraph.strip()):
        return True
    try:
        return bool(ast.parse(textwrap.dedent(paragraph)).body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


def _is_sentence(words: list[str]) -> bool:
    text = "".join(words)
    if len(words) < _MIN_WORDS or "->" in words:  # a line of a table
        return False
    return sum(map(str.isalpha, text)) >= _LEAST_LETTERS * len(text)
