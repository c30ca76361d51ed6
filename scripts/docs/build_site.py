"""Builds the documentation into a folder that a browser can open, without a server and without a network.

It prepares all pages in a temporary folder and runs Zensical on them. Preparing means: add the reference
pages, which are made from the code, and replace links to files that are not pages.
"""

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
# Another checkout may be installed, but the pages must be made from this one.
sys.path.insert(0, str(ROOT))

from scripts.docs import api_pages, settings_pages  # noqa: E402

_LINK_OUT = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>(?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")
_ASSETS = ("pictures", "javascripts")
_IN_EVERY_SITE = ("404.html", "index.html", "search.json")


def prepared_pages() -> dict[str, str]:
    """Return the Markdown text of every page, by its path in the site.

    Raises:
        ValueError: A page links to a file that does not exist.
    """
    docs = ROOT / "docs"
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(docs.glob("*.md"))}
    texts |= settings_pages.pages() | api_pages.pages()
    return {name: _with_named_files(name, text) for name, text in texts.items()}


def _with_named_files(page: str, text: str) -> str:
    """Replace links to files that are not pages by the paths of these files."""

    def named(link: re.Match[str]) -> str:
        base = posixpath.join("docs", posixpath.dirname(page))
        path = posixpath.normpath(posixpath.join(base, link["target"]))
        if path.startswith("docs/"):
            return link[0]
        if path.startswith("..") or not (ROOT / path).exists():
            raise ValueError(f"{page}: links to {link['target']}, which does not exist")
        words = link["text"].strip("`")
        return f"`{path}`" if words in (path, posixpath.basename(path)) else f"{link['text']} (`{path}`)"

    return _LINK_OUT.sub(named, text)


def prepare(folder: Path) -> None:
    """Write the pages, their pictures, and the site's settings into an empty folder."""
    for name, text in prepared_pages().items():
        page = folder / "pages" / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    for name in _ASSETS:
        shutil.copytree(ROOT / "docs" / name, folder / "pages" / name)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    for plugin in settings["plugins"]:
        if isinstance(plugin, dict) and "mkdocstrings" in plugin:
            plugin["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT)]
    settings["nav"][-1]["Reference"].append({"API": list(api_pages.pages())})
    settings["docs_dir"] = "pages"
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def build(target: Path) -> int:
    """Build the site into ``target``, whose old content is replaced. Return the exit code of Zensical."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder)
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        done = subprocess.run(command, cwd=folder, check=False)
        if done.returncode == 0:
            shutil.rmtree(target, ignore_errors=True)
            shutil.move(folder / "site", target)
        return done.returncode


def main() -> int:
    """Build the site into the folder that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", default=ROOT / "site", help="new folder, or a site to replace"
    )
    target = parser.parse_args().folder
    is_site = all((target / name).is_file() for name in _IN_EVERY_SITE)
    if target.exists() and not is_site and not (target.is_dir() and not any(target.iterdir())):
        parser.error(f"{target}: is neither empty nor a site that was built here; give a new folder")
    return build(target)


if __name__ == "__main__":
    sys.exit(main())
