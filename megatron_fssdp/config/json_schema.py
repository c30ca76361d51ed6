"""JSON Schema of a run's YAML, for editors."""

import json
from typing import Any

from megatron_fssdp.config.run_config import RunConfig
from megatron_fssdp.config.strategy_selection import SETTINGS_BY_STRATEGY


def run_config_schema() -> dict[str, Any]:
    """The schema; ``strategy.settings`` follows from ``strategy.name``."""
    schema = RunConfig.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    definitions = schema["$defs"]
    section = definitions["StrategySection"]
    section["properties"]["name"]["enum"] = list(SETTINGS_BY_STRATEGY)
    section["allOf"] = []
    for name, model in SETTINGS_BY_STRATEGY.items():
        definitions[model.__name__] = model.model_json_schema()
        choice: dict[str, Any] = {"properties": {"name": {"const": name}}}
        if name != "none":  # an absent name means none
            choice["required"] = ["name"]
        reference = {"$ref": f"#/$defs/{model.__name__}"}
        section["allOf"].append({"if": choice, "then": {"properties": {"settings": reference}}})
    return schema


def run_config_schema_text() -> str:
    """The schema as it is committed in ``configs/schema.json``."""
    return json.dumps(run_config_schema(), indent=2, ensure_ascii=False) + "\n"
