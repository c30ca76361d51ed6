"""The site builds strictly and loads nothing from elsewhere, and its generated parts are up to date."""

import html
import importlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from megatron_fssdp.config.run.sections import ModelArguments
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES

from ..browser import WIDTHS, needs_browser, opened_browser

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "docs"
PICTURES = ROOT / "docs" / "pictures"
# Finds elements of the page, those of its search (which keeps them to itself) included.
DEEP = """((selector) => {
  const inner = [...document.querySelectorAll("*")].map((one) => one.shadowRoot).filter(Boolean);
  const roots = [document, ...inner];
  return roots.flatMap((root) => [...root.querySelectorAll(selector)]);
})"""
# Addresses on other hosts that a browser fetches when it shows a page.
LOADED_FROM_ELSEWHERE = re.compile(
    r"<(?:script|img|iframe|source|link|object|video|audio)\s[^>]*?(?:src|href|data)=[\"']?(?:https?:)?//[^>]*>"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, SCRIPTS / "build_site.py", folder / "site"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine", encoding="utf-8")
    (tmp_path / "index.html").touch()
    done = subprocess.run(
        [sys.executable, SCRIPTS / "build_site.py", tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert f"{tmp_path}: is neither empty nor a site" in done.stderr
    assert notes.read_text(encoding="utf-8") == "mine"


@pytest.fixture
def docs_scripts(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(ROOT))
    return SCRIPTS


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        assert not LOADED_FROM_ELSEWHERE.findall(page.read_text(encoding="utf-8")), page
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", text), style


def test_every_link_leads_to_a_place_that_exists(site: Path) -> None:
    pages = {
        page: page.read_text(encoding="utf-8") for page in site.rglob("*.html") if page.name != "404.html"
    }
    places = {
        page: set(re.findall(r"\s(?:id|name)=[\"']?([^\"'\s>]+)", text)) for page, text in pages.items()
    }
    lost = []
    for page, text in pages.items():
        for address in re.findall(r"<a\s[^>]*?href=[\"']?([^\"'\s>]+)", text):
            path, _, place = unquote(html.unescape(address)).partition("#")
            if "://" in path or path.startswith("mailto:"):
                continue
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (place and target in places and place not in places[target]):
                lost.append(f"{page.relative_to(site)}: {address}")
    assert lost == []


@needs_browser
def test_pages_are_drawn_and_searched_as_files(site: Path) -> None:
    with opened_browser() as browser:
        for name in ("index.html", "compatibility.html", "reference/settings.html"):
            for width in WIDTHS:
                assert browser.open(site / name, width).faults() == [], f"{name}, {width} px"
        assert browser.open(site / "index.html", scheme="dark").faults() == []
        browser.evaluate("document.querySelector('.md-search__button').click()")
        browser.wait_for(f"{DEEP}('input[aria-label=Search]').length")
        browser.call("Input.insertText", text="rematerialize")
        browser.wait_for(
            f"{DEEP}('a[href*=\"settings.html\"], a[href*=\"fssdp.html\"]').some((a) => a.closest('ol, ul'))"
        )
        assert browser.console == []


@needs_browser
@pytest.mark.slow
def test_nothing_overlaps_on_any_page(site: Path) -> None:
    with opened_browser() as browser:
        for page in sorted(site.rglob("*.html")):
            for width in WIDTHS:
                assert browser.open(page, width).faults() == [], f"{page.name}, {width} px"


def test_every_setting_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "settings.html").read_text(encoding="utf-8")
    keys = set(ModelArguments.model_fields)
    for entry in STRATEGIES.values():
        keys |= set(entry.settings.model_fields)
    assert {key for key in keys if f"<code>{key}</code>" not in text} == set()


def test_generated_pages_have_their_content(site: Path) -> None:
    assert "megatron-fssdp simulate" in (site / "reference" / "commands.html").read_text(encoding="utf-8")
    assert "each_micro_batch" in (site / "reference" / "api" / "strategies.html").read_text(encoding="utf-8")
    contributing = re.sub(r"<[^>]+>", "", (site / "contributing.html").read_text(encoding="utf-8"))
    assert "class SecondHome(MovesOwners" in contributing
    assert "def test_it_trains_with_overlap" in contributing
    compatibility = (site / "compatibility.html").read_text(encoding="utf-8")
    assert "--moe-expert-rank-capacity-factor" in compatibility
    assert "--use-transformer-engine-op-fuser" in compatibility
    assert "<!-- table" not in compatibility


def _texts(svg: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_pictures_show_what_the_strategies_decide(docs_scripts: Path, tmp_path: Path) -> None:
    files = script("strategy_pictures").draw_all(tmp_path)
    assert {file.name for file in files} == {file.name for file in PICTURES.glob("strategy_*.svg")}
    for file in files:
        assert len(_texts(file)) > 10
        assert _texts(file) == _texts(PICTURES / file.name), (
            f"{file.name}: run `python scripts/docs/strategy_pictures.py`"
        )


def test_every_strategy_of_the_pages_has_a_picture() -> None:
    drawn = {file.stem.removeprefix("strategy_") for file in PICTURES.glob("strategy_*.svg")}
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert drawn == set(STRATEGIES) - {"none"}
    assert {name for name in drawn if f"(pictures/strategy_{name}.svg)" not in pages} == set()


def test_the_break_even_tables_match_the_jobs_of_the_script(docs_scripts: Path) -> None:
    table_of = script("break_even_table")
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert all(f"**{job.title}**" in page for job in table_of.JOBS.values())


def test_the_break_even_tables_are_of_jobs_that_fit_into_memory(docs_scripts: Path) -> None:
    jobs = script("break_even_table").JOBS
    for job in jobs.values():
        whole = job.whole_model  # refuses a job that does not fit
        assert whole.gib(whole.simulated_base_bytes) * 2**30 == whole.base_bytes < whole.capacity_bytes
        # Memory that is full for the simulated layers is full for the whole model.
        assert whole.gib(whole.simulated_capacity_bytes) * 2**30 == pytest.approx(whole.capacity_bytes)
    large = ("training.micro_batch_size=32", "training.global_batch_size=1024")
    with pytest.raises(ValueError, match="more than a device has"):
        replace(jobs["one-node"], overrides=large).whole_model  # noqa: B018
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert page.count("memory, GiB of") == len(jobs)
    assert "out of memory" not in page


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_break_even_table_equals_the_simulators_result(docs_scripts: Path) -> None:
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert script("break_even_table").table("one-node") in page, (
        "run `python scripts/docs/break_even_table.py` and copy what it prints into docs/choosing.md"
    )
