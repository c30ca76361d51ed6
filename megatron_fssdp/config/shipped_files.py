"""Finds the configs and the training scripts that come with the package by name, from any working folder."""

import difflib
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_FOLDER = Path("configs")
_CLUSTERS = "clusters"
_SUFFIX = ".yaml"
_SCRIPTS = _PACKAGE / "pretraining"


def shipped_folder() -> Path:
    """Return the folder of shipped files, in the installed package or in the checkout around the package."""
    installed = _PACKAGE / _FOLDER
    return installed if installed.is_dir() else _PACKAGE.parent / _FOLDER


def shipped_runs() -> dict[str, Path]:
    """Return the shipped YAML files of runs and parts of runs, by name.

    A name is the path below ``configs/`` without suffix, for example ``models/mixtral-8x7b``.
    """
    folder = shipped_folder()
    files = {path.relative_to(folder).with_suffix(""): path for path in sorted(folder.rglob(f"*{_SUFFIX}"))}
    return {name.as_posix(): path for name, path in files.items() if name.parts[0] != _CLUSTERS}


def shipped_run(name: Path | str) -> Path | None:
    """Return the shipped file of this name, with or without ``configs/`` and ``.yaml``, or None."""
    return shipped_runs().get(_bare(name))


def shipped_scripts() -> dict[str, Path]:
    """Return the training scripts that come with the package, by name, for example ``pretrain_gpt``.

    A printed command has the name, because the path is different on every machine.
    """
    return {path.stem: path for path in sorted(_SCRIPTS.glob("pretrain_*.py"))}


def complete_run(part: Path) -> str | None:
    """Return a complete run for a shipped part of runs: the experiment of its name, or ``gpt_moe_tiny``.

    It is None for a file that did not come with the package.
    """
    if not part.resolve().is_relative_to(shipped_folder().resolve()):
        return None
    experiment = f"experiments/{part.stem}"
    return experiment if experiment in shipped_runs() else "gpt_moe_tiny"


def closest_run(name: Path | str) -> str | None:
    """Return the name of a shipped run that is most similar to ``name``, or None if no name is similar."""
    return next(iter(difflib.get_close_matches(_bare(name), shipped_runs(), n=1)), None)


def known_clusters() -> dict[str, Path]:
    """Return the files of cluster descriptions by name.

    Files in ``configs/clusters`` of the working folder take precedence over shipped files.
    """
    folders = (shipped_folder() / _CLUSTERS, _FOLDER / _CLUSTERS)
    return {path.stem: path for folder in folders for path in sorted(folder.glob(f"*{_SUFFIX}"))}


def _bare(name: Path | str) -> str:
    path = Path(name)
    inside = path.relative_to(_FOLDER) if path.is_relative_to(_FOLDER) else path
    return inside.as_posix().removesuffix(_SUFFIX)
