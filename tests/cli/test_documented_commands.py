import re
import shlex

import pytest
import typer

from megatron_fssdp.cli.app import app
from tests.support.python_process import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "scripts").rglob("*.sh"))]
COMMAND = re.compile(r"(?:megatron-fssdp|-m megatron_fssdp) (?P<words>[a-z][^\n`]*)")
SHIPPED_FILE = re.compile(r"\bconfigs/[\w/-]+\.(?:yaml|json)\b")


def unknown_options(command):
    """Options that a command does not have; none where the words are not a command."""
    command = re.split(r"\s#\s|[|;()]|&&|>| = | -- ", command)[0]  # words after -- are Megatron's
    words = shlex.split(command.replace("'", "").replace('"', ""))
    group = typer.main.get_command(app)
    while hasattr(group, "commands"):
        if not words or words[0] not in group.commands:
            return []
        group, words = group.commands[words[0]], words[1:]
    known = {name for parameter in group.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return sorted({word.split("=")[0].rstrip(".,:") for word in words if re.match(r"--[a-z]", word)} - known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_commands_and_files_exist(page):
    text = re.sub(r"\s*\\\n\s*", " ", page.read_text(encoding="utf-8"))
    wrong = {match["words"]: unknown_options(match["words"]) for match in COMMAND.finditer(text)}
    assert {command: options for command, options in wrong.items() if options} == {}
    assert [file for file in SHIPPED_FILE.findall(text) if not (ROOT / file).is_file()] == []


def test_a_wrong_option_is_found():
    assert unknown_options("simulate --loads W3 --clutser x # --nope") == ["--clutser"]
