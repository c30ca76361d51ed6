"""Versions that the plugin is tested with: the only place in the package that states them.

``pyproject.toml`` has to repeat them for pip; a test compares the two.
"""

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

TESTED_VERSIONS = {
    "python": ">=3.12",
    "torch": ">=2.6",
    "megatron-core": ">=0.19,<0.21",
    "transformer-engine": ">=2.1",
}
"""By distribution, as pip writes ranges."""


def is_tested(distribution: str, version: str) -> bool | None:
    """Whether a version lies in the range; ``None`` if it is no version at all.

    Suffixes do not count: ``2.6.0a0+git`` is 2.6.0, as in NVIDIA's containers, and ``0.21.0rc0`` is 0.21.0.

    Args:
        distribution: A key of :data:`TESTED_VERSIONS`.
        version: What is installed.
    """
    try:
        base = Version(version).base_version
    except InvalidVersion:
        return None
    return SpecifierSet(TESTED_VERSIONS[distribution]).contains(base)


def requirement_of(distribution: str) -> str:
    """The tested versions of a distribution, as pip's requirement."""
    return distribution + TESTED_VERSIONS[distribution]


def pip_install(distribution: str) -> str:
    """The command that installs a tested version."""
    return f"pip install '{requirement_of(distribution)}'"
