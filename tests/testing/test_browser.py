import re

import pytest

FAULTS = {
    'overlap by .*: "one" and "two"': "<p>one</p><p style='margin-top: -26px'>two</p>",
    'overlap by .*: "100" and "120"': (
        "<svg width=200 height=50 style='font: 12px monospace'><text x=10 y=20>100</text>"
        "<text x=33 y=20>120</text></svg>"
    ),
    'overlap by .*: "turned" and "level"': (
        "<svg width=200 height=100><text x=20 y=80 transform='rotate(-90 20 80)'>turned</text>"
        "<text x=10 y=60>level</text></svg>"
    ),
    'cut off by .*: "a long label"': "<svg width=40 height=50><text x=0 y=20>a long label</text></svg>",
    "wider than its window": "<div style='width: 600px'>wide</div>",
    "nowhere is not defined": "<script>nowhere()</script>",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, browser, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{FAULTS[fault]}")
    faults = browser.open(path, 500).faults()
    assert len(faults) == 1
    assert re.search(fault, faults[0])


def test_what_a_reader_cannot_see_is_no_fault(browser, tmp_path):
    path = tmp_path / "good.html"
    hidden = (
        "<p style='margin-top: -26px; opacity: 0'>two</p><p style='margin-top: -26px; display: none'>x</p>"
    )
    turned = "<text x=30 y=60 transform='rotate(-45 30 60)'>corner</text><text x=53 y=68>x</text>"
    turned = f"<svg width=90 height=90>{turned}</svg>"
    scrolled = "<pre style='overflow: auto; width: 90px; float: left'>longer than its box</pre>beside"
    path.write_text(f"<!doctype html><body><p>one</p>{hidden}{turned}<div>{scrolled}</div>")
    assert browser.open(path, 500).faults() == []
