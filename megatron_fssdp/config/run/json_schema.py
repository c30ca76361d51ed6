"""JSON Schema of a run's YAML, so that editors can check and complete it."""

import json
from typing import Any

from megatron_fssdp.config.run import megatron_options
from megatron_fssdp.config.run.composition import INCLUDE_KEY
from megatron_fssdp.config.run.run_config import SECTIONS, RunConfig
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES

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
    """Return the JSON Schema of one YAML file of a run, with all arguments of the installed Megatron."""
    schema = RunConfig.model_json_schema()
    schema["properties"] = {INCLUDE_KEY: _INCLUDE, **schema["properties"]}
    del schema["required"]  # a file can be a part of a run
    definitions = schema["$defs"]
    definitions[_OPTIONS] = megatron_options.schema()
    described = definitions[_OPTIONS]["properties"]
    for model in SECTIONS.values():
        definition = definitions[model.__name__]
        definition.pop("required", None)
        del definition["additionalProperties"]
        for key, one in definition["properties"].items():
            one.setdefault("description", described.pop(key, {}).get("description"))
        definition |= {"allOf": [{"$ref": f"#/$defs/{_OPTIONS}"}], "unevaluatedProperties": False}
    choose_strategy_settings(schema, "StrategySection")
    return schema


def choose_strategy_settings(schema: dict[str, Any], section: str) -> None:
    """Let the name in a section of a schema decide about its settings; the schema is changed in place."""
    definitions = schema["$defs"]
    definitions[section]["properties"]["name"]["enum"] = list(STRATEGIES)
    definitions[section]["allOf"] = []
    for name, entry in STRATEGIES.items():
        settings = entry.settings.model_json_schema()
        definitions.update(settings.pop("$defs", {}))  # those of candidates of `auto`
        # If this file has no name, another file can name the strategy that the settings belong to.
        choice = {"properties": {"name": {"const": name}}, "required": ["name"]}
        definitions[section]["allOf"].append({"if": choice, "then": {"properties": {"settings": settings}}})


def schema_text(schema: dict[str, Any]) -> str:
    """Return a schema as JSON text, with the version of JSON Schema at the top."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps({**dialect, **schema}, indent=2, ensure_ascii=False) + "\n"
