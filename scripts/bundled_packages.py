"""Prints the packages of scripts/offline_bundle.sh: what the check imports, but torch and what torch brings.

The versions are those of the environment that runs this file.
"""

import importlib.metadata
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TESTS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")


def needed_by(names: Iterable[str], extras: Iterable[str] = ()) -> dict[str, str]:
    """Versions of packages and of all that they need here, by name."""
    versions: dict[str, str] = {}
    waiting = [(name, (*extras,)) for name in names]
    while waiting:
        name, chosen = waiting.pop()
        if (key := canonicalize_name(name)) in versions:
            continue
        package = importlib.metadata.distribution(name)
        versions[key] = package.version
        for requirement in map(Requirement, package.requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *chosen)):
                waiting.append((requirement.name, (*requirement.extras,)))
    return versions


if __name__ == "__main__":
    wanted = needed_by(["megatron-fssdp"], ["tools"]) | needed_by(TESTS)
    for name in sorted(wanted.keys() - needed_by(["torch"]).keys() - {"megatron-fssdp"}):
        print(f"{name}=={wanted[name]}")
