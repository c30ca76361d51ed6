"""JSON Schema of a run's YAML, for editors."""

import json
from typing import Any

from megatron_fssdp.config.composition import INCLUDE_KEY
from megatron_fssdp.config.run_config import RunConfig
from megatron_fssdp.config.strategy_selection import SETTINGS_BY_STRATEGY

_INCLUDE = {
    "type": "array",
    "items": {"type": "string", "minLength": 1},
    "description": (
        "YAML files that this one is laid over, later ones over earlier ones; relative to this file's folder."
    ),
}


def run_config_schema() -> dict[str, Any]:
    """The schema of one file.

    ``strategy.settings`` follows from ``strategy.name``. Files may be parts of a run, so keys are only
    required of those that have a model and a training and include nothing.
    """
    schema = RunConfig.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    schema["properties"] = {INCLUDE_KEY: _INCLUDE, **schema["properties"]}
    definitions = schema["$defs"]
    sections = schema.pop("required")
    schema["if"] = {"required": sections, "not": {"required": [INCLUDE_KEY]}}
    schema["then"] = {"properties": {}}
    for name in sections:
        definition = definitions[schema["properties"][name]["$ref"].removeprefix("#/$defs/")]
        schema["then"]["properties"][name] = {"required": definition.pop("required")}
    section = definitions["StrategySection"]
    section["properties"]["name"]["enum"] = list(SETTINGS_BY_STRATEGY)
    section["allOf"] = []
    for name, model in SETTINGS_BY_STRATEGY.items():
        definitions[model.__name__] = model.model_json_schema()
        # Settings inside settings are those of another strategy, which are there already.
        definitions[model.__name__].pop("$defs", None)
        # Without a name the settings may belong to a strategy that another file names.
        choice = {"properties": {"name": {"const": name}}, "required": ["name"]}
        reference = {"$ref": f"#/$defs/{model.__name__}"}
        section["allOf"].append({"if": choice, "then": {"properties": {"settings": reference}}})
    return schema


def run_config_schema_text() -> str:
    """The schema as it is committed in ``configs/schema.json``."""
    return json.dumps(run_config_schema(), indent=2, ensure_ascii=False) + "\n"
