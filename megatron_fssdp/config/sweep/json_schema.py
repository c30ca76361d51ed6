"""JSON Schema of a sweep's YAML, so that editors can check and complete it."""

from typing import Any

from megatron_fssdp.config.run.json_schema import choose_strategy_settings, schema_text
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.config.sweep.sweep_config import SweepConfig


def sweep_schema() -> dict[str, Any]:
    """Return the JSON Schema of a sweep's YAML."""
    schema = SweepConfig.model_json_schema()
    choose_strategy_settings(schema, "SweptStrategy")
    for choice in schema["properties"]["strategies"]["items"]["anyOf"]:
        if choice.get("type") == "string":
            choice["enum"] = list(STRATEGIES)
    return schema


def sweep_schema_text() -> str:
    """Return the schema as JSON text."""
    return schema_text(sweep_schema())
