"""Every command in the README and the documentation exists, with its options."""

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from megatron_fssdp.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "scripts").rglob("*.sh"))]
COMMAND = re.compile(r"(?:megatron-fssdp|-m megatron_fssdp) (?P<words>[a-z][^\n`]*)")
SHIPPED_FILE = re.compile(r"\bconfigs/[\w/-]+\.(?:yaml|json)\b")


def commands_in(text: str) -> list[str]:
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    return [match["words"] for match in COMMAND.finditer(joined)]


def words_of(command: str) -> list[str]:
    command = re.split(r"\s#\s|[|;()]|&&|>| = | -- ", command)[0]  # words after -- are Megatron's
    return shlex.split(command.replace("'", "").replace('"', ""))


def unknown_options(words: list[str]) -> list[str] | None:
    """Options that a command does not have; ``None`` where the words are not a command."""
    group: click.Command = typer.main.get_command(app)
    while hasattr(group, "commands"):
        if not words or words[0] not in group.commands:
            return None
        group, words = group.commands[words[0]], words[1:]
    known = {name for parameter in group.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.split("=")[0].rstrip(".,:") for word in words if re.match(r"--[a-z]", word)}
    return sorted(given - known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_of_documented_commands_exist(page: Path) -> None:
    for command in commands_in(page.read_text(encoding="utf-8")):
        assert not unknown_options(words_of(command)), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_files_are_shipped(page: Path) -> None:
    for file in SHIPPED_FILE.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / file).is_file(), file


def test_the_search_finds_commands_and_wrong_options() -> None:
    text = (
        "`megatron-fssdp simulate --loads W3 --clutser x`\nmegatron-fssdp data build a \\\n  --out b --nope"
    )
    first, second = commands_in(text)
    assert unknown_options(words_of(first)) == ["--clutser"]
    assert unknown_options(words_of(second)) == ["--nope"]
    found = sum(
        unknown_options(words_of(command)) is not None
        for page in PAGES
        for command in commands_in(page.read_text("utf-8"))
    )
    assert found > 60
    assert sum(len(SHIPPED_FILE.findall(page.read_text("utf-8"))) for page in PAGES) > 20
