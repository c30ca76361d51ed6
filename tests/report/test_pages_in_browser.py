"""Pages drawn by a real browser, without a network: nothing overlaps, and the console stays silent."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from megatron_fssdp.reporting.html.html_page import HtmlPage
from megatron_fssdp.reporting.page.report_page import report_page
from megatron_fssdp.reporting.page.reported_run import read_reported_runs

from megatron_fssdp.records.metrics import RunSession

from ...browser import WIDTHS, Browser, needs_browser, opened_browser
from ..page.made_runs import write_made_run
from ..simulation_page.made_simulation import made_simulation_page

pytestmark = needs_browser


def page_of_a_run(folder: Path) -> HtmlPage:
    sizes = {"num_iterations": 40, "num_layers": 6, "num_experts": 32, "num_devices": 16}
    return report_page(read_reported_runs([write_made_run(folder / "hecate-gpt-moe-s", **sizes)]))


def page_of_three_runs(folder: Path) -> HtmlPage:
    names = ("ep", "fssdp", "fastermoe")
    folders = [write_made_run(folder / name, name, num_iterations=60, num_layers=4) for name in names]
    return report_page(read_reported_runs(folders))


def page_of_a_resumed_run(folder: Path) -> HtmlPage:
    shared = {"ranks": 4, "cores": 2}
    starts = {1: RunSession("ep", 60, **shared), 21: RunSession("fssdp", 80, **shared)}
    starts |= {61: RunSession("fssdp", 80, **shared), 64: RunSession("fastermoe", 80, **shared)}
    run = write_made_run(folder / "resumed", num_iterations=70, num_layers=4, starts=starts)
    return report_page(read_reported_runs([run]))


PAGES: dict[str, Callable[[Path], HtmlPage]] = {
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
    page, path = PAGES[name](tmp_path), tmp_path / "page.html"
    page.write(path)
    for width in WIDTHS:
        browser.open(path, width)
        assert browser.faults() == [], f"{width} px"
    browser.prefer("dark")  # draws all figures again
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert browser.faults() == []
    names = [f"figure-{figure.name}" for section in page.sections for figure in section.figures]
    names += ["placement-figure"] if page.placements else []
    undrawn = [
        one for one in names if not browser.evaluate(f"document.querySelector('#{one} .main-svg') !== null")
    ]
    assert undrawn == []


def test_the_slider_shows_another_iteration(browser: Browser, tmp_path: Path) -> None:
    runs = read_reported_runs([write_made_run(tmp_path / "ep", "ep"), write_made_run(tmp_path / "fssdp")])
    report_page(runs).write(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    browser.evaluate(
        "const slider = document.getElementById('placement-iteration');"
        "slider.value = 0; slider.dispatchEvent(new Event('input'));"
    )
    placements = runs[-1].placements
    assert placements is not None
    layer = int(placements.ep_tokens_ILD[-1].max(axis=1).argmax())
    tokens_D = placements.tokens_ILD[0, layer]
    words = browser.evaluate("document.getElementById('placement-words').textContent")
    assert words.startswith(f"iteration 1: {placements.replicas_IL[0, layer]} replicas; busiest device ")
    assert f" {tokens_D.max() / tokens_D.mean():.2f} × mean" in words


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
