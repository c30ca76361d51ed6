"""Pages drawn by a real browser, without a network."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_fssdp.reporting.page.report_page import page_html, page_sections, write_page
from megatron_fssdp.reporting.page.reported_run import read_reported_runs

from .made_runs import write_made_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = os.environ.get("CHROME") or next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no Chromium found: none of {', '.join(NAMES)} is on PATH, and CHROME is not set"
)

MOVE_THE_SLIDER = """
<script>
const slider = document.getElementById("placement-iteration");
slider.value = 0;
slider.dispatchEvent(new Event("input"));
</script>
"""


def opened(page: Path, scratch: Path) -> tuple[str, list[str]]:
    """The document after its scripts ran, and every line of the console."""
    assert BROWSER is not None
    command = [
        *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={scratch / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"),
        *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=20000", "--window-size=1400,1000"),
        *("--dump-dom", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_every_figure_is_drawn_and_the_console_is_silent(tmp_path: Path) -> None:
    runs = read_reported_runs(
        [write_made_run(tmp_path / "ep", "ep"), write_made_run(tmp_path / "fssdp", "fssdp")]
    )
    sections = page_sections(runs)
    page = tmp_path / "page.html"
    write_page(page, page_html(runs, sections).replace("</body>", MOVE_THE_SLIDER + "</body>"))
    document, console = opened(page, tmp_path)
    assert console == []
    names = [f"figure-{figure.name}" for section in sections for figure in section.figures]
    names.append("placement-figure")
    assert f'data-drawn="{len(names)}"' in document
    for name in names:
        start = document.index(f'id="{name}"')
        following = document.find('class="figure', start)
        assert 'class="main-svg"' in document[start : following if following > 0 else None], name
    # The script turned the slider of the last run back to the first iteration.
    placements = runs[-1].placements
    assert placements is not None
    words = re.search(r'<output id="placement-words"[^>]*>([^<]*)</output>', document)
    assert words is not None
    layer = int(placements.ep_tokens_ILD[-1].max(axis=1).argmax())
    tokens_D = placements.tokens_ILD[0, layer]
    assert words[1].startswith(f"iteration 1: {placements.replicas_IL[0, layer]} replicas; busiest device ")
    assert f" {tokens_D.max() / tokens_D.mean():.2f} × mean" in words[1]


def test_a_failing_script_is_detected(tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text("<!doctype html><script>nowhere()</script>")
    _, console = opened(tmp_path / "bad.html", tmp_path)
    assert len(console) == 1
    assert "nowhere is not defined" in console[0]
