"""The only list of strategies: shipped ones, those that a program registers, and those of other packages."""

import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from pydantic import Field, create_model

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import apply_overrides, load_yaml, unknown_name, validate
from megatron_fssdp.config.strategy import shipped_settings as shipped
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings, StrategySettings

logger = logging.getLogger(__name__)

ENTRY_POINTS = "megatron_fssdp.strategies"
SHIPPED = "megatron-fssdp"
"""The ``package`` of strategies that come with this project."""

BASELINE = "ep"
"""Plain expert parallelism, which the others are compared with and which ``auto`` starts from."""

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

    def __init__(self, entries: Iterable[RegisteredStrategy], group: str = ENTRY_POINTS) -> None:
        self._group = group
        self._entries = {entry.name: entry for entry in entries}
        self._broken: dict[str, str] = {}
        self._is_loaded = False
        self._loading: str | None = None

    def __getitem__(self, name: str) -> RegisteredStrategy:
        entry = self._with_installed()[name]
        if not issubclass(entry.settings, shipped.AutoSettings):
            return entry
        return _automatic(entry, tuple(one for one in self._entries.values() if one.is_candidate))

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
        entry = replace(entry, package=self._loading or entry.package)
        problem = ""
        if entry.name in self._entries:
            problem = f"is registered already, by {self._entries[entry.name].package}; give it another name"
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
        self._entries[entry.name] = entry

    def _with_installed(self) -> dict[str, RegisteredStrategy]:
        if self._is_loaded:
            return self._entries
        self._is_loaded = True  # first, because what is loaded may look here
        for point in sorted(entry_points(group=self._group), key=lambda one: (one.name, _package(one))):
            self._loading = _package(point)
            try:
                point.load()()
                if point.name not in self._entries:
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
        return self._entries


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


@cache
def _automatic(entry: RegisteredStrategy, candidates: tuple[RegisteredStrategy, ...]) -> RegisteredStrategy:
    """The entry of ``auto`` with a settings key for each candidate."""
    also = "true: with default settings. false: not a candidate. A mapping: with these settings."
    keys: dict[str, Any] = {
        one.name: (bool | one.settings, Field(default=True, description=f"Candidate: {one.summary}. {also}"))
        for one in candidates
    }
    base = shipped.AutoSettings
    model = create_model(
        base.__name__, __base__=base, __module__=base.__module__, __doc__=base.__doc__, **keys
    )
    model.candidate_settings = {one.name: one.settings for one in candidates}
    return replace(entry, settings=model)


def _shipped(
    settings: type[StrategySettings], strategy: str | None, colour: str, **marks: Any
) -> RegisteredStrategy:
    """A shipped strategy, whose name and summary are in the docstring of its settings."""
    name, summary = inspect.cleandoc(settings.__doc__ or "").removeprefix("``").rstrip(".").split("``: ", 1)
    path = None if strategy is None else f"megatron_fssdp.strategies.{strategy}"
    return RegisteredStrategy(name, settings, path, summary, colour, **marks)


# Colours: Okabe-Ito, two of Tol's and a brown: told apart by colour-blind readers, and seen on light and dark
# ground. Where `auto` finds candidates equal it takes the first one, so what moves least comes first.
STRATEGIES = StrategyRegistry(
    (
        _shipped(shipped.NoneSettings, None, "#7F7F7F", is_ranked=False),
        _shipped(shipped.EpSettings, "baselines:EpStrategy", "#0072B2"),
        _shipped(shipped.FssdpSettings, "fssdp:FssdpStrategy", "#D55E00", is_candidate=True),
        _shipped(shipped.ProphetSettings, "baselines:ProphetStrategy", "#CC79A7", is_candidate=True),
        _shipped(shipped.FastermoeSettings, "baselines:FastermoeStrategy", "#009E73", is_candidate=True),
        _shipped(shipped.QuotaSettings, "baselines:QuotaStrategy", "#AA4499", is_candidate=True),
        _shipped(shipped.SmartmoeSettings, "baselines:SmartmoeStrategy", "#56B4E9", is_candidate=True),
        _shipped(shipped.FlexmoeSettings, "baselines:FlexmoeStrategy", "#E69F00"),
        # What is Parm's own is how tokens travel, which is the runtime's business; owners stay.
        _shipped(shipped.ParmSettings, "baselines:EpStrategy", "#999933", is_ranked=False),
        _shipped(shipped.AutoSettings, "auto:build_auto", "#8C564B", is_ranked=False),
    )
)


def resolve_strategy(
    name: str, config_path: Path | str | None = None, overrides: Sequence[str] = ()
) -> StrategySettings:
    """Return a strategy's settings: the keys of a YAML file, then ``key=value`` overrides."""
    data = {} if config_path is None else load_yaml(config_path)
    sources = [] if config_path is None else [str(config_path)]
    if overrides:
        data = apply_overrides(data, overrides, "--moe-strategy-set")
        sources.append("--moe-strategy-set")
    return strategy_settings(name, data, " + ".join(sources) or "defaults")


def strategy_settings(name: str, data: dict[str, Any], source: str) -> StrategySettings:
    """Validate a strategy's keys, which ``source`` gives, or raise a ConfigurationError."""
    if name not in STRATEGIES:
        broken = STRATEGIES.broken.get(name)
        raise ConfigurationError(broken or unknown_name("MoE strategy", name, STRATEGIES))
    entry = STRATEGIES[name]
    for key in data:
        owners = [other for other, one in STRATEGIES.items() if key in one.settings.model_fields]
        if owners and name not in owners:
            reason = "" if entry.strategy else ", which runs Megatron's own dispatcher and plans nothing"
            raise ConfigurationError(
                f"{source}: key '{key}' has no meaning under strategy '{name}'{reason}; it belongs to "
                f"{', '.join(owners)}; remove the key, or select another strategy with --moe-strategy"
            )
    return validate(entry.settings, data, f"{source} (strategy {name})")
