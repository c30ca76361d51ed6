"""The only list of strategies: shipped ones, those that a program registers, and those of other packages."""

import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import apply_overrides, load_yaml, unknown_name, validate
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings, StrategySettings

logger = logging.getLogger(__name__)

ENTRY_POINTS = "megatron_fssdp.strategies"
SHIPPED = "megatron-fssdp"
"""The ``package`` of strategies that come with this project."""

BASELINE = "ep"
"""Plain expert parallelism, which the others are compared with and which ``auto`` starts from."""

# Where `auto` finds candidates equal it takes the first one, so what moves least comes first.
_FOLDERS = "none", "ep", "fssdp", "prophet", "fastermoe", "quota", "smartmoe", "flexmoe", "parm", "auto"

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class RegisteredStrategy:
    """What :func:`register_strategy` is told of a strategy; ``none`` has no class that plans."""

    name: str
    settings: type[StrategySettings]
    strategy: Callable[[Any], Any] | str | None
    summary: str
    colour: str | None = None
    is_candidate: bool = False
    is_ranked: bool = True
    package: str = SHIPPED


class StrategyRegistry(Mapping[str, RegisteredStrategy]):
    """Strategies by name; installed packages are loaded when first needed."""

    def __init__(
        self, shipped: Callable[[], Iterable[RegisteredStrategy]], group: str = ENTRY_POINTS
    ) -> None:
        self._shipped, self._group = shipped, group
        self._entries: dict[str, RegisteredStrategy] = {}
        self._broken: dict[str, str] = {}
        self._is_loaded = False
        self._loading: str | None = None

    def __getitem__(self, name: str) -> RegisteredStrategy:
        entry = self._with_installed()[name]
        with_candidates = getattr(entry.settings, "with_candidates", None)
        if with_candidates is None:
            return entry
        candidates = {entry.name: entry for entry in self._entries.values() if entry.is_candidate}
        return replace(entry, settings=with_candidates(tuple(candidates.values())))

    def __iter__(self) -> Iterator[str]:
        return iter(self._with_installed())

    def __len__(self) -> int:
        return len(self._with_installed())

    @property
    def broken(self) -> Mapping[str, str]:
        """What is wrong with each strategy of an installed package that could not be registered, by name."""
        self._with_installed()
        return self._broken

    def add(self, entry: RegisteredStrategy) -> None:
        """Register one more strategy, or raise a ConfigurationError if it does not fit."""
        entry, entries = replace(entry, package=self._loading or entry.package), self._with_shipped()
        problem = ""
        if entry.name in entries:
            problem = f"is registered already, by {entries[entry.name].package}; give it another name"
        elif not _NAME.fullmatch(entry.name):
            problem = "wanted a name of a lower-case letter, then such letters, digits and underscores"
        elif not (isinstance(entry.settings, type) and issubclass(entry.settings, PlacementSettings)):
            problem = (
                f"got settings {entry.settings!r}, wanted a subclass of PlacementSettings from "
                "megatron_fssdp.config.strategy.strategy_settings"
            )
        elif needed := [key for key, field in entry.settings.model_fields.items() if field.is_required()]:
            problem = f"settings key '{needed[0]}' has no default, wanted one for each key"
        if problem:
            raise ConfigurationError(
                f"register_strategy: strategy '{entry.name}' of {entry.package}: {problem}"
            )
        entries[entry.name] = entry

    def _with_shipped(self) -> dict[str, RegisteredStrategy]:
        if not self._entries:
            self._entries = {entry.name: entry for entry in self._shipped()}
        return self._entries

    def _with_installed(self) -> dict[str, RegisteredStrategy]:
        entries = self._with_shipped()
        if self._is_loaded:
            return entries
        self._is_loaded = True  # first, because what is loaded may look here
        for point in sorted(entry_points(group=self._group), key=lambda point: (point.name, _package(point))):
            self._loading = _package(point)
            try:
                point.load()()
                if point.name not in entries:
                    raise ConfigurationError(f"{point.value} registered no strategy of this name")
            except Exception as error:  # whatever goes wrong in another package
                reason = str(error) if isinstance(error, ConfigurationError) else repr(error)
                text = (
                    f"strategy '{point.name}' of the installed package {self._loading} cannot be used: "
                    f"{' '.join(reason.split())}; update the package, or pip uninstall {self._loading}"
                )
                self._broken.setdefault(point.name, text)
                if os.environ.get("RANK", "0") == "0":
                    logger.warning(f"[fssdp] {text}. Other strategies are not affected")
            finally:
                self._loading = None
        return entries


def register_strategy(
    name: str,
    *,
    settings: type[PlacementSettings],
    strategy: Callable[[Any], Any] | str,
    summary: str,
    colour: str | None = None,
    candidate: bool = False,
    ranked: bool = True,
) -> None:
    """Make a strategy known by its name, to the command line, the simulator, reports and ``auto`` alike.

    Packages call it in the function that they name as an entry point of the group
    ``megatron_fssdp.strategies``; a script of your own calls it before Megatron parses its arguments.

    Args:
        name: A lower-case letter, then such letters, digits and underscores.
        settings: Model of the strategy's keys, each of which has a default.
        strategy: The strategy's class, a function that makes one from its settings, or either as
            ``"module:attribute"``, which is imported when a strategy is built.
        summary: One line for help texts and tables.
        colour: ``#RRGGBB`` in pictures and on report pages. Default: a colour that is left.
        candidate: Whether ``auto`` may select it. It then has a key of this name under ``auto``.
        ranked: Whether what-if reports rank it unless they are told names.

    Raises:
        ConfigurationError: The name is taken, or an argument does not fit.
    """
    package = getattr(settings, "__module__", "a script").partition(".")[0]
    STRATEGIES.add(RegisteredStrategy(name, settings, strategy, summary, colour, candidate, ranked, package))


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def shipped(
    settings: type[StrategySettings], strategy: str | None, colour: str, **marks: Any
) -> RegisteredStrategy:
    """The entry of a shipped strategy. Its folder has its name, and its settings' docstring a summary."""
    name = settings.__module__.rpartition(".")[2]
    summary = inspect.cleandoc(settings.__doc__ or "").partition("``: ")[2].rstrip(".")  # none under -OO
    path = None if strategy is None else f"megatron_fssdp.strategies.{strategy}"
    return RegisteredStrategy(name, settings, path, summary, colour, **marks)


def _all_shipped() -> Iterator[RegisteredStrategy]:
    """What the folders of the shipped strategies declare. Colour-blind readers can tell the colours apart."""
    for name in _FOLDERS:
        yield import_module(f"megatron_fssdp.strategies.{name}").ENTRY


STRATEGIES = StrategyRegistry(_all_shipped)


def resolve_strategy(
    name: str, config_path: Path | str | None = None, overrides: Sequence[str] = ()
) -> StrategySettings:
    """Return a strategy's settings: the keys of a YAML file, then ``key=value`` overrides."""
    values = {} if config_path is None else load_yaml(config_path)
    sources = [] if config_path is None else [str(config_path)]
    if overrides:
        values = apply_overrides(values, overrides, "--moe-strategy-set")
        sources.append("--moe-strategy-set")
    return strategy_settings(name, values, " + ".join(sources) or "defaults")


def strategy_settings(name: str, values: dict[str, Any], source: str) -> StrategySettings:
    """Validate a strategy's keys, which ``source`` gives, or raise a ConfigurationError."""
    if name not in STRATEGIES:
        broken = STRATEGIES.broken.get(name)
        raise ConfigurationError(broken or unknown_name("MoE strategy", name, STRATEGIES))
    entry = STRATEGIES[name]
    for key in values:
        owners = [owner for owner, candidate in STRATEGIES.items() if key in candidate.settings.model_fields]
        if owners and name not in owners:
            reason = "" if entry.strategy else ", which runs Megatron's own dispatcher and plans nothing"
            raise ConfigurationError(
                f"{source}: key '{key}' has no meaning under strategy '{name}'{reason}; it belongs to "
                f"{', '.join(owners)}; remove the key, or select another strategy with --moe-strategy"
            )
    return validate(entry.settings, values, f"{source} (strategy {name})")
