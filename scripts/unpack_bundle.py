"""Unpacks from a bundle of scripts/offline_bundle.sh what the Python that runs this file lacks, without pip.

    python scripts/unpack_bundle.py BUNDLE

Packages that are there stay in use, because others of that machine may need just these versions. A wheel goes
into BUNDLE/site-packages if its package is missing, or too old or too new for another one that goes there.
"""

import importlib.metadata
import shutil
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path


def unpack(bundle: Path) -> None:
    """Unpack what is lacking, unless an earlier call did.

    Raises:
        SystemExit: The bundle has no wheels for this Python.
    """
    wheels, packages = sorted((bundle / "wheels").glob("*.whl")), bundle / "site-packages"
    tags = {wheel.name.split("-")[-3] for wheel in wheels} - {"py3", "py2.py3"}
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if own not in tags:
        got = ", ".join(sorted(tags)) or "no wheels"
        sys.exit(
            f"error: --bundle {bundle}: got {got}, wanted wheels for {own}; make the bundle with --python"
        )
    if packages.exists():
        return
    partial = packages.with_name("site-packages.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for wheel in lacking(wheels):
        zipfile.ZipFile(wheel).extractall(partial)
    partial.mkdir(exist_ok=True)
    partial.rename(packages)


def lacking(wheels: Iterable[Path]) -> list[Path]:
    """Return those wheels that this Python needs."""
    here = _packages()
    offered = {name: (wheel, dist) for wheel in wheels for name, dist in _packages([str(wheel)]).items()}
    if "packaging" in offered:
        sys.path.append(str(offered["packaging"][0]))  # Python imports from a wheel of Python code
    from packaging.requirements import Requirement

    chosen = offered.keys() - here.keys()
    waiting = sorted(chosen)
    while waiting:
        for requirement in map(Requirement, offered[waiting.pop()][1].requires or ()):
            name = _key(requirement.name)
            if name in chosen or name not in offered:
                continue
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and not requirement.specifier.contains(here[name].version, prereleases=True):
                chosen.add(name)
                waiting.append(name)
    return [offered[name][0] for name in sorted(chosen)]


def _packages(path: list[str] | None = None) -> dict[str, importlib.metadata.Distribution]:
    """Return the packages of a path by name; by default those of this Python."""
    distributions = importlib.metadata.distributions(path=sys.path if path is None else path)
    return {_key(dist.name): dist for dist in reversed([*distributions])}  # of two, the first is imported


def _key(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
