"""``flexmoe``: FlexMoE: resident replicas with optimizer states of their own."""

from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.strategies.flexmoe.flexmoe_settings import FlexmoeSettings

ENTRY = shipped(FlexmoeSettings, "flexmoe.flexmoe_strategy:FlexmoeStrategy", "#E69F00")
