"""Parses a page without using the code that made it."""

import base64
import json
from html.parser import HTMLParser

import numpy as np

VOID = {"meta", "link", "input", "br", "img", "hr"}


class PageParts(HTMLParser):
    """The parts of a page that tests compare: figures, as they are given to plotly, and texts by section."""

    def __init__(self, html):
        super().__init__()
        self.anchors = []
        self.addresses = []
        self.styles = []
        self.texts = {}
        self.summary = ""
        self._places = []
        self._data = ""
        self._open = []
        self.feed(html)
        self.close()
        assert not self._open, f"not closed: {self._open}"
        self.figures = {}
        for anchor, figure in zip(self._places, json.loads(self._data), strict=True):
            self.figures.setdefault(anchor, []).append(figure)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag == "section":
            self.anchors.append(attributes["id"] or "")
        if attributes.get("class") == "figure":
            assert attributes["id"] == f"figure-{len(self._places)}"
            self._places.append(self.anchors[-1])
        if tag not in VOID:
            self._open.append((tag, attributes))

    def handle_endtag(self, tag):
        opened, _ = self._open.pop()
        assert opened == tag, f"<{opened}> ended by </{tag}>"

    def handle_data(self, data):
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag == "style":
            self.styles.append(data)
        elif attributes.get("id") == "figures-data":
            self._data = data
        elif attributes.get("class") == "summary":
            self.summary = data
        elif tag != "script" and "section" in [opened for opened, _ in self._open]:
            self.texts[self.anchors[-1]] = self.texts.get(self.anchors[-1], "") + data


def unpacked(packed):
    """An array as plotly.js reads it."""
    if isinstance(packed, list):
        return np.asarray(packed)
    array = np.frombuffer(base64.b64decode(packed["bdata"]), dtype="<" + packed["dtype"])
    return array.reshape([int(size) for size in packed.get("shape", str(array.size)).split(",")])
