"""JSON Schema of a sweep's YAML, so that editors can check and complete it."""

from typing import Any

from megatron_fssdp.config.run.json_schema import DIALECT, choose_strategy_settings, schema_text
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.config.sweep.sweep_config import SweepConfig

RUN_SCHEMA = "schema.json"
"""File with the schema of runs, beside the schema of sweeps."""


def sweep_schema() -> dict[str, Any]:
    """Return the JSON Schema of a sweep's YAML. Settings of strategies are in the schema of runs."""
    schema = {**DIALECT, **SweepConfig.model_json_schema()}
    choose_strategy_settings(schema["$defs"]["SweptStrategy"], RUN_SCHEMA)
    for choice in schema["properties"]["strategies"]["items"]["anyOf"]:
        if choice.get("type") == "string":
            choice["enum"] = list(STRATEGIES)
    return schema


def sweep_schema_text() -> str:
    """Return the schema as JSON text, as committed in ``configs/sweep-schema.json``."""
    return schema_text(sweep_schema())
