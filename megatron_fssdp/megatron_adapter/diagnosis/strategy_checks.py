"""Strategies that other installed packages bring."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fssdp.config.strategy_registry import SHIPPED, STRATEGIES, BrokenStrategy
from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict

CHECK = "strategies"


@dataclass(frozen=True)
class InstalledStrategies:
    """What loading the entry points of installed packages gave.

    Attributes:
        num_shipped: Strategies of this package.
        of_packages: (name, package) of those that other packages registered.
        broken: Those that could not be registered.
    """

    num_shipped: int = 0
    of_packages: tuple[tuple[str, str], ...] = ()
    broken: tuple[BrokenStrategy, ...] = ()


def look_for_strategies() -> InstalledStrategies:
    """Load the strategies of installed packages."""
    packages = [(name, entry.package) for name, entry in STRATEGIES.items()]
    of_packages = tuple(each for each in packages if each[1] != SHIPPED)
    return InstalledStrategies(
        len(packages) - len(of_packages), of_packages, tuple(STRATEGIES.broken.values())
    )


def check_strategies(found: InstalledStrategies) -> Sequence[Finding]:
    """One finding for all strategies that can be used, and one for each that cannot."""
    words = f"{found.num_shipped} of megatron-fssdp"
    for name, package in found.of_packages:
        words += f", {name} of {package}"
    return [
        Finding(CHECK, words, Verdict.OK),
        *(
            Finding(
                f"strategy {broken.name}",
                f"of {broken.package}, cannot be used: {broken.reason}",
                Verdict.NOTE,
                f"update the package or pip uninstall {broken.package}; other strategies are not affected",
            )
            for broken in found.broken
        ),
    ]
