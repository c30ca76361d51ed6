"""JSON Schemas of a run's YAML and of a sweep's, so that editors can check and complete them."""

import json
from typing import Any

from megatron_fssdp.config.run import megatron_options
from megatron_fssdp.config.run.composition import INCLUDE_KEY
from megatron_fssdp.config.run.run_config import SECTIONS, RunConfig
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES

DIALECT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
"""What stands at the top of a schema."""

_OPTIONS = "MegatronArguments"
_INCLUDE = {
    "type": "array",
    "items": {"type": "string", "minLength": 1},
    "description": (
        "YAML files that this file builds on, relative to this file's folder. Later files win over earlier "
        "files, and this file wins over all of them."
    ),
}


def run_config_schema() -> dict[str, Any]:
    """Return the JSON Schema of one YAML file of a run, with all arguments of the installed Megatron.

    ``strategy.name`` decides the schema of ``strategy.settings``. A file can be a part of a run. Therefore
    keys are required only in files that have both ``model`` and ``training`` and include no other file.
    """
    schema = {**DIALECT, **RunConfig.model_json_schema()}
    schema["properties"] = {INCLUDE_KEY: _INCLUDE, **schema["properties"]}
    definitions = schema["$defs"]
    definitions[_OPTIONS] = megatron_options.schema()
    described = definitions[_OPTIONS]["properties"]
    sections = schema.pop("required")
    schema["if"] = {"required": sections, "not": {"required": [INCLUDE_KEY]}}
    schema["then"] = {"properties": {}}
    for name, model in SECTIONS.items():
        definition = definitions[model.__name__]
        if name in sections:
            schema["then"]["properties"][name] = {"required": definition.pop("required")}
        del definition["additionalProperties"]
        for key, one in definition["properties"].items():
            one.setdefault("description", described.pop(key, {}).get("description"))
        definition |= {"allOf": [{"$ref": f"#/$defs/{_OPTIONS}"}], "unevaluatedProperties": False}
    choose_strategy_settings(definitions["StrategySection"])
    for settings in (entry.settings for entry in STRATEGIES.values()):
        definitions[settings.__name__] = settings.model_json_schema()
        # Nested settings are those of other strategies, which have their own definitions.
        definitions[settings.__name__].pop("$defs", None)
    return schema


def choose_strategy_settings(section: dict[str, Any], file: str = "") -> None:
    """Let the strategy's name in a section decide the schema of the settings beside it.

    Args:
        section: Schema of a mapping with ``name`` and ``settings``; changed in place.
        file: Schema that has the settings of every strategy in its ``$defs``. Default: the section's own.
    """
    section["properties"]["name"]["enum"] = list(STRATEGIES)
    section["allOf"] = []
    for name, entry in STRATEGIES.items():
        # If this file has no name, another file can name the strategy that the settings belong to.
        choice = {"properties": {"name": {"const": name}}, "required": ["name"]}
        reference = {"$ref": f"{file}#/$defs/{entry.settings.__name__}"}
        section["allOf"].append({"if": choice, "then": {"properties": {"settings": reference}}})


def run_config_schema_text() -> str:
    """Return the schema as JSON text, as committed in ``configs/schema.json``."""
    return schema_text(run_config_schema())


def schema_text(schema: dict[str, Any]) -> str:
    """Return a schema as JSON text."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
