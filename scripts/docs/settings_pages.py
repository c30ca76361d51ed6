"""Generate the reference pages of settings and commands from the pydantic models and the commands' help."""

import inspect
import json
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.run.megatron_options import description
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings

_KINDS = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
    dict: "mapping",
}


def pages() -> dict[str, str]:
    """Return the Markdown text of each page, by its path below docs/."""
    return {"reference/settings.md": _settings_page(), "reference/commands.md": _commands_page()}


def settings_table(model: type[BaseModel], *, without: Sequence[type[BaseModel]] = ()) -> str:
    """Return a Markdown table of a model's keys with kind, default and meaning.

    Args:
        model: Pydantic model whose keys are listed.
        without: Models whose keys are left out if they have the same default and meaning there.
    """
    known = {name: field for left_out in without for name, field in left_out.model_fields.items()}
    lines = ["| key | kind | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name in known and repr(known[name]) == repr(field):
            continue
        meaning = field.description or description(name)
        cells = (f"`{name}`", kind_of_field(field), shown_default(field), meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def strategies_table() -> str:
    """Every registered strategy with what it does and who lists it."""
    lines = ["| strategy | what it does | `auto` may select it | ranked by reports |", "|---|---|---|---|"]
    for name, entry in STRATEGIES.items():
        cells = (
            entry.summary,
            *("yes" if is_so else "no" for is_so in (entry.is_candidate, entry.is_ranked)),
        )
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def keys_table() -> str:
    """Every key of a strategy, and the strategies that have it."""
    names = list(STRATEGIES)
    keys = dict.fromkeys(key for entry in STRATEGIES.values() for key in entry.settings.model_fields)
    lines = [f"| key | {' | '.join(f'`{name}`' for name in names)} |", "|---" * (1 + len(names)) + "|"]
    for key in keys:
        marks = ("✓" if key in STRATEGIES[name].settings.model_fields else "" for name in names)
        lines.append(f"| `{key}` | {' | '.join(marks)} |")
    return "\n".join(lines)


def _settings_page() -> str:
    parts = [
        "# Settings",
        "This page lists all settings. It is made from the models that validate them "
        "(`megatron_fssdp.config`). How files are combined is described in [configs](../configs.md). "
        "In `model`, `parallelism` and `training`, every other argument of Megatron can be given, too.",
    ]
    for section, field in RunConfig.model_fields.items():
        inner = field.annotation
        if section == "strategy" or not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            continue
        parts += [f"## `{section}`", inspect.getdoc(inner) or "", settings_table(inner)]
    parts += ["## The other keys", settings_table(_without_sections(RunConfig))]
    parts += [
        "## `strategy`",
        "`strategy.name` is the name of a strategy, and `strategy.settings` has the keys of that strategy. "
        "`--moe-strategy-set KEY=VALUE` and the file of `--moe-strategy-config` take the same keys.",
        strategies_table(),
        "Which strategy has which key:",
        keys_table(),
    ]
    for shared, users in _shared_keys().items():
        names = ", ".join(f"`{name}`" for name in users)
        parts += [f"### Keys of {names}", settings_table(shared, without=_bases(shared))]
    for name, entry in STRATEGIES.items():
        model = entry.settings
        parts += [f"### `{name}`", inspect.getdoc(model) or ""]
        if set(model.model_fields) - {key for base in _bases(model) for key in base.model_fields}:
            parts.append(settings_table(model, without=_bases(model)))
    parts += ["## A cluster's description", inspect.getdoc(ClusterDescription) or ""]
    parts += [
        "[The simulator](../simulator.md#clusters) reads such a description.",
        settings_table(ClusterDescription),
    ]
    return "\n\n".join(parts) + "\n"


def _shared_keys() -> dict[type[StrategySettings], list[str]]:
    """Base models that several strategies share keys from, most general first, with the strategies' names."""
    users: dict[type[StrategySettings], list[str]] = {}
    for name, entry in STRATEGIES.items():
        model = entry.settings
        for base in reversed(model.__mro__):
            if issubclass(base, StrategySettings) and base is not model:
                users.setdefault(base, []).append(name)
    return dict(sorted(users.items(), key=lambda item: len(item[0].__mro__)))


def _bases(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The models whose keys a model has, the closest last."""
    return [base for base in reversed(model.__mro__[1:]) if issubclass(base, StrategySettings)]


def _without_sections(model: type[BaseModel]) -> type[BaseModel]:
    """Return a model of the keys that are not sections."""
    fields = {
        name: field
        for name, field in model.model_fields.items()
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
    }
    reduced: type[BaseModel] = type(
        "Other", (BaseModel,), {"__annotations__": {name: field.annotation for name, field in fields.items()}}
    )
    reduced.model_fields.update(fields)
    return reduced


def kind_of_field(field: FieldInfo) -> str:
    """The kind of a key and its limits, in words."""
    words = _kind_of(field.annotation)
    limits = {type(rule).__name__: rule for rule in field.metadata}
    for name, attribute, text in (("Ge", "ge", "≥"), ("Gt", "gt", ">"), ("Le", "le", "≤"), ("Lt", "lt", "<")):
        if name in limits:
            words += f", {text} {getattr(limits[name], attribute)}"
    return words


def _kind_of(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind_of(arguments[0])
    if origin is typing.Literal:
        return ", ".join(
            f"`{json.dumps(value) if not isinstance(value, str) else value}`" for value in arguments
        )
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind_of(inner) for inner in arguments if inner is not type(None))
    if origin in (tuple, list):
        return f"list of {_kind_of(arguments[0])}"
    if origin is dict:
        return "mapping"
    if annotation in [entry.settings for entry in STRATEGIES.values()]:
        return "keys of that strategy"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return ", ".join(f"`{name}`" for name in annotation.model_fields)
    return _KINDS.get(annotation, str(annotation))


def shown_default(field: FieldInfo) -> str:
    """The default of a key as code, or that the key is required."""
    if field.default is not PydanticUndefined:
        value = field.default
        return f"`{value if isinstance(value, str) and value else json.dumps(value, default=list)}`"
    if field.default_factory is not None:
        return "`{}`"
    return "**required**"


def _commands_page() -> str:
    import typer
    import typer.cli

    from megatron_fssdp.cli.app import app

    command = typer.main.get_command(app)
    text = typer.cli.get_docs_for_click(
        obj=command, ctx=typer.Context(command, info_name="megatron-fssdp"), name="megatron-fssdp"
    )
    return (
        "\n".join(
            [
                "# Commands",
                "",
                "This page has the `--help` texts of all commands.",
                "",
                *text.splitlines()[1:],
            ]
        )
        + "\n"
    )
