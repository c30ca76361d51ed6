"""Every strategy's page lists every setting with the default that the code has."""

import json
import re
from pathlib import Path

import pytest

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| `(?P<key>\w+)` \| `(?P<default>[^`]*)`[^|]*\| (?P<meaning>[^|]+) \|$", re.MULTILINE)
# The page, and the heading of the strategy's section where a page describes several strategies.
PAGES = {
    "fssdp": ("fssdp.md", None),
    "fastermoe": ("fastermoe.md", None),
    "prophet": ("prophet.md", None),
    "smartmoe": ("baselines.md", "## SmartMoE"),
    "flexmoe": ("baselines.md", "## FlexMoE"),
    "quota": ("baselines.md", "## Quotas"),
    "parm": ("parm.md", "## Settings"),
    "auto": ("auto.md", "## Settings"),
}


def test_every_strategy_has_a_page() -> None:
    assert set(PAGES) == set(STRATEGIES) - {"none", "ep"}


@pytest.mark.parametrize("name", PAGES)
def test_every_setting_is_documented_with_its_default(name: str) -> None:
    page, heading = PAGES[name]
    text = (DOCS / page).read_text(encoding="utf-8")
    if heading is not None:
        text = text[text.index(heading) :].partition("\n## ")[0]
    documented = {row["key"]: row["default"] for row in ROW.finditer(text)}
    defaults = STRATEGIES[name].settings().model_dump(mode="json")
    assert documented == {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in defaults.items()
    }
