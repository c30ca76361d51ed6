"""The files of ``configs/``, which come with the package: found by name, wherever a command is started."""

import difflib
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_FOLDER = Path("configs")
_CLUSTERS = "clusters"
_SUFFIX = ".yaml"


def shipped_folder() -> Path:
    """The folder of shipped files: an installed package's, or that of the checkout that the package is in."""
    installed = _PACKAGE / _FOLDER
    return installed if installed.is_dir() else _PACKAGE.parent / _FOLDER


def shipped_runs() -> dict[str, Path]:
    """Runs and parts of runs by name: the path below ``configs/``, as in ``models/mixtral-8x7b``."""
    folder = shipped_folder()
    files = {path.relative_to(folder).with_suffix(""): path for path in sorted(folder.rglob(f"*{_SUFFIX}"))}
    return {name.as_posix(): path for name, path in files.items() if name.parts[0] != _CLUSTERS}


def shipped_run(name: Path | str) -> Path | None:
    """The file of a run or a part of one.

    Args:
        name: One of :func:`shipped_runs`; ``configs/`` before it and ``.yaml`` behind it change nothing.

    Returns:
        The file, or nothing if none is called that.
    """
    return shipped_runs().get(_bare(name))


def closest_run(name: Path | str) -> str | None:
    """The shipped run whose name is most like this one; nothing if none is."""
    close = difflib.get_close_matches(_bare(name), shipped_runs(), n=1)
    return close[0] if close else None


def known_clusters() -> dict[str, Path]:
    """Cluster descriptions by name; the working folder's ``configs/clusters`` come before shipped ones."""
    folders = (shipped_folder() / _CLUSTERS, _FOLDER / _CLUSTERS)
    return {path.stem: path for folder in folders for path in sorted(folder.glob(f"*{_SUFFIX}"))}


def _bare(name: Path | str) -> str:
    path = Path(name)
    inside = path.relative_to(_FOLDER) if path.is_relative_to(_FOLDER) else path
    return inside.as_posix().removesuffix(_SUFFIX)
