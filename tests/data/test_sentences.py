"""Sentences are taken from docstrings and paragraphs, but not from code, tables and rulers."""

import textwrap
from pathlib import Path

from megatron_fssdp.data.sentences import MAX_WORDS, sentences

SOURCE = '''\
"""Reads and writes something. It takes two
lines to say so!

    >>> f(1) == 2
    True
"""

# A comment is not read.


def f(x):
    def inner():
        """Does it, e.g. with numbers, as J. Doe wanted. "Really?" Yes, it does."""
    return x  # 0x00 -> START OF HEADING
'''


def test_python_gives_its_docstrings() -> None:
    assert sentences(SOURCE, is_python=True) == [
        "Reads and writes something.",
        "It takes two lines to say so!",
        "Does it, e.g. with numbers, as J. Doe wanted.",
        "Yes, it does.",
    ]
    assert sentences("def f(:\n", is_python=True) == []
    assert len(sentences(Path(textwrap.__file__).read_text(encoding="utf-8"), is_python=True)) > 30


def test_other_texts_are_paragraphs_and_each_sentence_is_kept_once() -> None:
    text = (
        "# A heading of this\n\nFirst words here. Then\nsome more.\n\n=====\n\n1 | 2 | 3\n\nFirst words here."
    )
    assert sentences(text, is_python=False) == ["A heading of this", "First words here.", "Then some more."]


def test_long_sentences_are_cut() -> None:
    words = [f"word{'abc'[i % 3]}" for i in range(MAX_WORDS * 2 + 5)]
    found = sentences(" ".join(words), is_python=False)
    assert [len(sentence.split()) for sentence in found] == [MAX_WORDS, MAX_WORDS, 5]
    assert " ".join(found).split() == words
