"""Pages drawn by a real browser, without a network: nothing overlaps, and the console stays silent."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_fssdp.records.metrics import RunSession
from megatron_fssdp.report.page import Page
from megatron_fssdp.report.trainings.run_page import run_page
from megatron_fssdp.report.trainings.shown_run import shown_runs

from ..browser import WIDTHS, Browser, needs_browser, opened_browser
from .made_runs import write_made_run
from .made_simulation import made_simulation_page

pytestmark = needs_browser


def page_of_a_run(folder: Path) -> Page:
    sizes = {"num_iterations": 40, "num_layers": 6, "num_experts": 32, "num_devices": 16}
    return run_page(shown_runs([write_made_run(folder / "hecate-gpt-moe-s", **sizes)]))


def page_of_three_runs(folder: Path) -> Page:
    names = ("ep", "fssdp", "fastermoe")
    return run_page(
        shown_runs([write_made_run(folder / name, name, num_iterations=60, num_layers=4) for name in names])
    )


def page_of_a_resumed_run(folder: Path) -> Page:
    shared = {"ranks": 4, "cores": 2}
    starts = {1: RunSession("ep", 60, **shared), 21: RunSession("fssdp", 80, **shared)}
    run = write_made_run(folder / "resumed", num_iterations=70, num_layers=4, starts=starts)
    return run_page(shown_runs([run]))


PAGES: dict[str, Callable[[Path], Page]] = {
    "run": page_of_a_run,
    "comparison": page_of_three_runs,
    "resumed": page_of_a_resumed_run,
    "simulation": made_simulation_page,
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened_browser() as running:
        yield running


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wrong_with_a_page(name: str, browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    PAGES[name](tmp_path).write(path)
    for width in WIDTHS:
        browser.open(path, width)
        assert browser.faults() == [], f"{width} px"
    browser.prefer("dark")  # draws all figures again
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert browser.faults() == []
    undrawn = (
        "[...document.querySelectorAll('.figure')].filter((one) => !one.querySelector('.main-svg')).length"
    )
    assert browser.evaluate(undrawn) == 0


def test_the_slider_shows_another_iteration(browser: Browser, tmp_path: Path) -> None:
    run_page(shown_runs([write_made_run(tmp_path / "fssdp")])).write(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    figure = "[...document.querySelectorAll('.figure')].find((one) => one.layout.sliders)"
    shown = f"{figure}.data.map((trace) => trace.visible)"
    assert browser.evaluate(shown) == [False] * 4 + [True]
    browser.evaluate(f"Plotly.restyle({figure}, ...{figure}.layout.sliders[0].steps[1].args).then(() => 0)")
    assert browser.evaluate(shown) == [False, True, False, False, False]
    assert browser.faults() == []


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
def test_faults_are_found(fault: str, browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{FAULTS[fault]}")
    found = browser.open(path, 500).faults()
    assert len(found) == 1
    assert re.search(fault, found[0])


def test_what_a_reader_cannot_see_is_no_fault(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "good.html"
    hidden = (
        "<p style='margin-top: -26px; opacity: 0'>two</p><p style='margin-top: -26px; display: none'>x</p>"
    )
    turned = "<text x=30 y=60 transform='rotate(-45 30 60)'>corner</text><text x=53 y=68>x</text>"
    turned = f"<svg width=90 height=90>{turned}</svg>"
    scrolled = "<pre style='overflow: auto; width: 90px; float: left'>longer than its box</pre>beside"
    path.write_text(f"<!doctype html><body><p>one</p>{hidden}{turned}<div>{scrolled}</div>")
    assert browser.open(path, 500).faults() == []
