"""Hooks of mkdocs.yml: add the pages made from the code, and handle links to files that are not pages."""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Another checkout may be installed, but the pages must be made from this one.
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import api_pages  # noqa: E402
import compatibility_tables  # noqa: E402
import settings_pages  # noqa: E402

_LINK_OUT = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>\.\./[^)#\s]+)(?:#[^)]*)?\)")


_TABLE = re.compile(r"^<!-- table: (?P<name>\w+) -->$", re.MULTILINE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code."""
    for path, content in {**settings_pages.pages(), **api_pages.pages()}.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files, **_: Any) -> str:
    """Insert the tables made from the code; replace links to files that are not pages by their paths."""
    tables = compatibility_tables.tables()
    markdown = _TABLE.sub(lambda marker: tables[marker["name"]], markdown)

    def named(link: re.Match[str]) -> str:
        base = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
        path = posixpath.normpath(posixpath.join(base, link["target"]))
        if path.startswith("docs/"):
            return link[0]
        if path.startswith("..") or not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: links to {link['target']}, which does not exist")
        text = link["text"].strip("`")
        return f"`{path}`" if text in (path, posixpath.basename(path)) else f"{link['text']} (`{path}`)"

    return _LINK_OUT.sub(named, markdown)
