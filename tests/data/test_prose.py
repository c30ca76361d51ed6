"""Sentences are taken from docstrings, comments and paragraphs, but not from code, tables and rulers."""

import ast
import textwrap
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_fssdp.data.prose import MAX_WORDS, sentences

SOURCE = '''\
#!/usr/bin/env python3
# -*- coding: utf-8 -*-
"""Reads and writes something. It takes two
lines to say so!

    >>> f(1) == 2
    True

- an item of a list
- and another item
"""

# These two lines are
# one sentence of a comment.
# x = f(1, 2)


def f(x):  # what stands behind code
    # ------------------------------
    # return g(x) + 1

    def inner():
        """Does it, e.g. with numbers, as J. Doe wanted. "Really?" Yes, it does."""
    return x  # 0x00 -> START OF HEADING
'''


def test_python_gives_docstrings_and_comments_in_order() -> None:
    assert sentences(SOURCE, is_python=True) == [
        "Reads and writes something.",
        "It takes two lines to say so!",
        "an item of a list",
        "and another item",
        "These two lines are one sentence of a comment.",
        "what stands behind code",
        "Does it, e.g. with numbers, as J. Doe wanted.",
        "Yes, it does.",
    ]


def test_other_texts_are_paragraphs() -> None:
    text = "# A heading of this\n\nFirst words here. Then\nsome more of them.\n\n=====\n\n1 | 2 | 3\n"
    assert sentences(text, is_python=False) == [
        "A heading of this",
        "First words here.",
        "Then some more of them.",
    ]


def test_repeated_sentences_are_kept_once() -> None:
    assert sentences("All rights are reserved.\n\nAll rights are reserved.", is_python=False) == [
        "All rights are reserved."
    ]


def test_long_sentences_are_cut() -> None:
    words = [f"word{'abc'[i % 3]}" for i in range(MAX_WORDS * 2 + 5)]
    found = sentences(" ".join(words), is_python=False)
    assert [len(sentence.split()) for sentence in found] == [MAX_WORDS, MAX_WORDS, 5]
    assert " ".join(found).split() == words


def test_a_source_with_a_syntax_error_still_gives_its_comments() -> None:
    assert sentences("# a comment of three words\ndef f(:\n", is_python=True) == ["a comment of three words"]


PIECES = [
    "word",
    "Other",
    "e.g.",
    "end.",
    "=",
    "#",
    "# ",
    '"""',
    "def f():",
    "\n",
    "\n\n",
    "- ",
    "\t",
    "\\x41",
    "1",
]
TEXTS = st.text(max_size=300) | st.lists(st.sampled_from(PIECES), max_size=60).map(" ".join)


@given(TEXTS, st.booleans())
@example("Three words here. And three more.", False)
@example("# Three words here.", True)
def test_sentences_of_any_text_consist_of_its_words(text: str, is_python: bool) -> None:
    letters = set(text.expandtabs())
    for sentence in sentences(text, is_python):
        assert 3 <= len(sentence.split()) <= MAX_WORDS
        assert sentence == " ".join(sentence.split())
        assert set(sentence) <= letters | {" "} or is_python  # docstrings can contain escapes


def test_no_sentence_of_a_module_is_python_code() -> None:
    found = sentences(Path(textwrap.__file__).read_text(encoding="utf-8"), is_python=True)
    assert len(found) > 50
    for sentence in found:
        with pytest.raises(SyntaxError):
            ast.parse(sentence)
