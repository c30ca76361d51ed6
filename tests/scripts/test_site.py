import html
import importlib
import re
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from devtools.browser import WIDTHS

from ..support.python_process import ROOT, python_output, run_python

DOCS = ROOT / "docs"
SCRIPTS = ROOT / "scripts" / "docs"
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted(DOCS.glob("*.md"))]
LINK = re.compile(r"\]\((?P<path>[^)\s#:]*)(?:#[^)\s]*)?\)")
# Addresses on other hosts that a browser fetches when it shows a page.
LOADED_FROM_ELSEWHERE = re.compile(
    r"<(?:script|img|iframe|source|link|object|video|audio)\s[^>]*?(?:src|href|data)=[\"']?(?:https?:)?//[^>]*>"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "site"
    python_output(SCRIPTS / "build_site.py", folder)
    return folder


def script(name, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name + "-" + page.name)
def test_links_lead_to_files_of_the_repository(page):
    """Also without a build, as on GitHub."""
    links = [unquote(link["path"]) for link in LINK.finditer(page.read_text(encoding="utf-8"))]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


def test_links_and_places_on_the_site_exist(site):
    pages = {page: page.read_text("utf-8") for page in site.rglob("*.html") if page.name != "404.html"}
    named = re.compile(r"\s(?:id|name)=[\"']?([^\"'\s>]+)")
    places = {page: set(named.findall(text)) for page, text in pages.items()}
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
    assert len(pages) > 30
    assert {page for page, text in pages.items() if LOADED_FROM_ELSEWHERE.search(text)} == set()


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_generated_parts_are_fresh(page, monkeypatch):
    text = page.read_text(encoding="utf-8")
    assert script("tables", monkeypatch).written(text) == text, "run `python scripts/docs/tables.py`"


def test_the_picture_shows_what_the_strategy_decides(monkeypatch, tmp_path):
    drawer = script("strategy_picture", monkeypatch)
    drawer.write(tmp_path / "drawn.svg")
    drawn, kept = (
        [element.text for element in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]
        for svg in (tmp_path / "drawn.svg", drawer.PICTURE)
    )
    assert len(drawn) > 10
    assert drawn == kept, "run `python scripts/docs/strategy_picture.py`"


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert run_python(SCRIPTS / "build_site.py", tmp_path).returncode == 2
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("pages", ["index.html", pytest.param("*.html", marks=pytest.mark.slow)])
def test_nothing_overlaps_in_a_browser(site, pages, browser):
    # The page of a wrong address has links from the root of a server, which a folder does not have.
    for page in sorted(page for page in site.rglob(pages) if page.name != "404.html"):
        for width, scheme in zip(WIDTHS, ("light", "dark", "light"), strict=True):
            assert browser.open(page, width, scheme).faults() == [], f"{page.name}, {width} px, {scheme}"
            browser.evaluate("localStorage.clear()")  # the site remembers a scheme
    assert browser.console == []
