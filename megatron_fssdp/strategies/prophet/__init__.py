"""``prophet``: Pro-Prophet: hot experts on some of the devices, planned ahead."""

from megatron_fssdp.config.loading import setting
from megatron_fssdp.config.strategy.strategy_registry import shipped
from megatron_fssdp.config.strategy.strategy_settings import NO_SLOTS, SlotKeys


class ProphetSettings(SlotKeys):
    """``prophet``: Pro-Prophet: hot experts on some of the devices, planned ahead."""

    left_out: int | None = setting(
        None,
        "Number of devices to which a selected expert is not sent: those with the fewest tokens for it "
        "(Pro-Prophet §IV-B, n). If it is given, only the paper's Eq. 1 to 8 decide. Default: the number "
        "among 0, 1, 2, 4, … with the fewest seconds over the real links, or no replicas if they are faster.",
        no_effect_if=NO_SLOTS,
        ge=0,
    )
    overlap: bool = setting(
        True,
        "Whether transfers overlap compute (Pro-Prophet's scheduler): experts during the compute before "
        "the layer, those that take longer in two parts, one of them during the experts of the layer before "
        "(§V-B), and gradients during the backward pass, in one part. The planner takes this into account "
        "(Eq. 8). Off: one runs after the other (Eq. 6).",
        no_effect_if=NO_SLOTS,
    )


ENTRY = shipped(ProphetSettings, "prophet.prophet_strategy:ProphetStrategy", "#CC79A7")
