"""The strategy's layer in Megatron's hybrid models, in which Mamba, attention and experts alternate.

Multi-token prediction of these models repeats a pattern of layers whose numbers start at 1 again, and
Megatron 0.19 does not tell an MoE layer that it belongs there.
"""

import inspect
import sys
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_fssdp.megatron_adapter.wrapping import wrap

# Number of layers of multi-token prediction before the pattern that is being built.
_before: ContextVar[int | None] = ContextVar("layers of multi-token prediction before", default=None)


def numbers_before() -> int | None:
    """Layers of multi-token prediction before the pattern that is being built; ``None`` outside of them."""
    return _before.get()


def with_layer(mlp: Any, layer: Any) -> Any:
    """Replace Megatron's ``MoELayer`` in a builder by ``layer``; return other builders unchanged."""
    if not (isinstance(mlp, partial) and isinstance(mlp.func, type) and issubclass(mlp.func, MoELayer)):
        return mlp
    given = {key: value for key, value in mlp.keywords.items() if key != "session"}
    return partial(layer, *mlp.args, **given)


def install(layer: Any) -> None:
    """Build ``layer`` instead of ``MoELayer`` in hybrid models, and number layers of their prediction."""
    # The spec has Megatron's layer since its import; if it is imported later, it finds the strategy's layer.
    if (module := sys.modules.get("megatron.core.models.hybrid.hybrid_layer_specs")) is not None:
        submodules = module.hybrid_stack_spec.submodules.moe_layer.submodules
        submodules.mlp = with_layer(submodules.mlp, layer)
    _number_predicted_layers()


@cache  # once in a process
def _number_predicted_layers() -> None:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    wrap(MultiTokenPredictionLayer, "__init__", _build_prediction)


def _build_prediction(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(stock).bind(self, *args, **kwargs).arguments
    pattern = given.get("mtp_layer_pattern") or ""
    token = _before.set((given.get("layer_number", 1) - 1) * len(pattern))
    try:
        stock(self, *args, **kwargs)
    finally:
        _before.reset(token)
