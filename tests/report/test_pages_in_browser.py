import pytest

from devtools.browser import WIDTHS
from megatron_fssdp.records.metrics import RunSession
from megatron_fssdp.report.measures import shown_runs
from megatron_fssdp.report.run_page import run_page

from .made_runs import write_made_run
from .made_simulation import made_simulation_page


def page_of_a_run(folder):
    sizes = {"num_iterations": 12, "num_layers": 4, "num_experts": 32, "num_devices": 16}
    sizes |= {"num_micro_batches": 4}
    return run_page(shown_runs([write_made_run(folder / "hecate-gpt-moe-s", **sizes)]))


def page_of_three_runs(folder):
    """The last run was resumed with another strategy, and its ranks share cores."""
    shared = {"ranks": 4, "cores": 2}
    starts = {1: RunSession("ep", 60, **shared), 21: RunSession("fssdp", 80, **shared)}
    sizes = {"num_iterations": 30, "num_layers": 2, "num_micro_batches": 2}
    names = {"ep": None, "fastermoe": None, "fssdp": starts}
    runs = [write_made_run(folder / name, name, **sizes, starts=of) for name, of in names.items()]
    return run_page(shown_runs(runs))


PAGES = {"run": page_of_a_run, "comparison": page_of_three_runs, "simulation": made_simulation_page}


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wrong_with_a_page(name, browser, tmp_path):
    path = tmp_path / "page.html"
    PAGES[name](tmp_path).write(path)
    for width, scheme in zip(WIDTHS[::2], ("dark", "light"), strict=True):
        browser.open(path, width, scheme)
        assert browser.faults() == [], f"{width} px, {scheme}"
    if name == "run":
        browser.prefer("dark")  # draws all figures again
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        assert browser.faults() == []
    figures = "[...document.querySelectorAll('.figure')]"
    assert browser.evaluate(f"{figures}.every((one) => one.querySelector('.main-svg') !== null)")
