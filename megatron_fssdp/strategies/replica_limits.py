"""How many replicas a device may hold where the settings leave it open."""

from megatron_fssdp.strategies.strategy import LayerContext


def slots_of(given: int | None, context: LayerContext) -> int:
    """What is given, else what the measured free memory holds, else as many as the device owns.

    Args:
        given: From the settings.
        context: The layer.
    """
    if given is not None:
        return given
    if context.profile is not None:
        return context.profile.memory_capacity
    return -(-context.num_experts // context.num_devices)


def described_slots(given: int | None, context: LayerContext) -> str:
    """The same in words."""
    return f"slots m = {slots_of(given, context)} ({'given' if given is not None else 'measured'})"
