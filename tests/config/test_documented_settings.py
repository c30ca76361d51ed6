"""The page on FSSDP lists every setting with the default that the code has."""

import json
import re
from pathlib import Path

from megatron_fssdp.config.strategy_settings import FssdpSettings

PAGE = Path(__file__).parents[2] / "docs" / "fssdp.md"
ROW = re.compile(r"^\| `(?P<key>\w+)` \| `(?P<default>[^`]*)`[^|]*\| (?P<meaning>[^|]+) \|$", re.MULTILINE)


def test_every_setting_is_documented_with_its_default() -> None:
    documented = {row["key"]: row["default"] for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))}
    defaults = FssdpSettings().model_dump(mode="json")
    assert documented == {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in defaults.items()
    }
