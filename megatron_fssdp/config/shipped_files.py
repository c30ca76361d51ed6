"""Finds the configs that come with the package by name, from any working folder."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_FOLDER = Path("configs")
_CLUSTERS = "clusters"
_SUFFIX = ".yaml"


def shipped_folder() -> Path:
    """Return the folder of shipped files, in the installed package or in the checkout around the package."""
    installed = _PACKAGE / _FOLDER
    return installed if installed.is_dir() else _PACKAGE.parent / _FOLDER


def shipped_runs() -> dict[str, Path]:
    """Return the shipped YAML files of runs and parts of runs by name, such as ``models/mixtral-8x7b``."""
    folder = shipped_folder()
    files = {path.relative_to(folder).with_suffix(""): path for path in sorted(folder.rglob(f"*{_SUFFIX}"))}
    return {name.as_posix(): path for name, path in files.items() if name.parts[0] != _CLUSTERS}


def shipped_run(name: Path | str) -> Path | None:
    """Return the shipped file of this name, with or without ``configs/`` and ``.yaml``, or None."""
    path = Path(name)
    inside = path.relative_to(_FOLDER) if path.is_relative_to(_FOLDER) else path
    return shipped_runs().get(inside.as_posix().removesuffix(_SUFFIX))


def known_clusters() -> dict[str, Path]:
    """Return cluster descriptions by name; those in the working folder win over those of the package."""
    folders = (shipped_folder() / _CLUSTERS, _FOLDER / _CLUSTERS)
    return {path.stem: path for folder in folders for path in sorted(folder.glob(f"*{_SUFFIX}"))}


def shipped_cluster(name: Path | str) -> Path | None:
    """Return a description by name, with or without ``configs/``, ``clusters/`` and ``.yaml``, or None."""
    inside = Path(name).as_posix().removeprefix(f"{_FOLDER}/").removeprefix(f"{_CLUSTERS}/")
    return known_clusters().get(inside.removesuffix(_SUFFIX))
