"""The JSON Schemas that editors use."""

import json

from megatron_fssdp.config.run.json_schema import run_config_schema, schema_text
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.config.sweep.sweep_config import sweep_schema


def test_the_schema_of_a_run_has_all_arguments_and_lets_the_name_choose_the_settings() -> None:
    schema = run_config_schema()
    assert json.loads(schema_text(schema)).items() >= schema.items()
    definitions = schema["$defs"]
    assert definitions["MegatronArguments"]["properties"]["num_workers"]["type"] == "integer"
    assert (
        "Number of transformer layers"
        in definitions["ModelArguments"]["properties"]["num_layers"]["description"]
    )
    chosen = definitions["StrategySection"]["allOf"]
    assert [one["if"]["properties"]["name"]["const"] for one in chosen] == list(STRATEGIES)
    assert "$schema" in json.loads(schema_text(sweep_schema()))
