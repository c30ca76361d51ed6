"""``flexmoe``: FlexMoE: resident replicas with optimizer states of their own."""

from megatron_fssdp.config.loading import setting
from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.config.strategy.strategy_settings import ExchangeKeys


class FlexmoeSettings(ExchangeKeys):
    """``flexmoe``: FlexMoE: resident replicas with optimizer states of their own."""

    slots: int = setting(
        1,
        "Number of resident replicas of a layer that a device can hold. Parameters, gradients and optimizer "
        "states of all of them are allocated at the start and kept.",
        ge=1,
    )
    placement_interval: int = setting(25, "Number of iterations after which replicas are reconsidered.", ge=1)
    window: int = setting(25, "Number of iterations whose mean load decides the replicas.", ge=1)
    overlap: bool = setting(
        True, "Whether gradients are summed during the backward pass. Off: the pass waits for sums."
    )


ENTRY = shipped(FlexmoeSettings, "flexmoe.flexmoe_strategy:FlexmoeStrategy", "#E69F00")
