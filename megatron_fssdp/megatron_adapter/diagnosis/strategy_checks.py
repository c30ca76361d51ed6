"""Checks the strategies that this package and other installed packages provide."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fssdp.config.strategy.strategy_registry import SHIPPED, STRATEGIES, BrokenStrategy
from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict

CHECK = "strategies"


@dataclass(frozen=True)
class InstalledStrategies:
    """Strategies found on this machine.

    Attributes:
        num_shipped: Number of strategies of this package.
        of_packages: Name and package of each strategy that another installed package registered.
        broken: Strategies of other packages that could not be registered.
    """

    num_shipped: int = 0
    of_packages: tuple[tuple[str, str], ...] = ()
    broken: tuple[BrokenStrategy, ...] = ()


def look_for_strategies() -> InstalledStrategies:
    """Load the strategies of this package and of other installed packages."""
    packages = [(name, entry.package) for name, entry in STRATEGIES.items()]
    of_packages = tuple(each for each in packages if each[1] != SHIPPED)
    return InstalledStrategies(
        len(packages) - len(of_packages), of_packages, tuple(STRATEGIES.broken.values())
    )


def check_strategies(found: InstalledStrategies) -> Sequence[Finding]:
    """Return one finding for all strategies that work, and one for each strategy that does not.

    Args:
        found: Strategies found on this machine.
    """
    words = f"{found.num_shipped} from megatron-fssdp"
    for name, package in found.of_packages:
        words += f", {name} from {package}"
    return [
        Finding(CHECK, words, Verdict.OK),
        *(
            Finding(
                f"strategy {broken.name}",
                f"from {broken.package}, cannot be used: {broken.reason}",
                Verdict.NOTE,
                f"update the package, or remove it: pip uninstall {broken.package}; other strategies work",
            )
            for broken in found.broken
        ),
    ]
