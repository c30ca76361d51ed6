"""Versions with which the plugin is tested. No other module of the package states them.

``pyproject.toml`` repeats them for pip, and a test compares the two.
"""

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

TESTED_VERSIONS = {
    "python": ">=3.12",
    "torch": ">=2.6",
    "megatron-core": ">=0.19,<0.21",
    "transformer-engine": ">=2.1",
}
"""Tested version range of each distribution, in pip's notation."""


def is_tested(distribution: str, version: str) -> bool | None:
    """Whether a version lies in the tested range; ``None`` if the text is not a version number.

    Suffixes are ignored: ``2.6.0a0+git``, as in NVIDIA's containers, counts as 2.6.0.
    """
    try:
        base = Version(version).base_version
    except InvalidVersion:
        return None
    return SpecifierSet(TESTED_VERSIONS[distribution]).contains(base)


def requirement_of(distribution: str) -> str:
    """Return the tested versions of a distribution as a requirement for pip."""
    return distribution + TESTED_VERSIONS[distribution]


def pip_install(distribution: str) -> str:
    """Return the command that installs a tested version of a distribution."""
    return f"pip install '{requirement_of(distribution)}'"
