"""Load-balanced MoE training strategies for stock Megatron-LM.

There are four ways to use the plugin:

- The launcher (``torchrun … -m megatron_fssdp pretrain_gpt.py …``) runs an unmodified training script.
- ``scripts/apply_patches.sh`` adds the flag ``--moe-strategy`` to a checkout of Megatron-LM.
- :func:`register` adds the plugin inside your own script.
- The spec functions (:func:`get_gpt_decoder_block_spec` and its siblings) serve models that are built from
  megatron-core's layer specs, without a command line.

Importing this package imports neither torch nor Megatron.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("megatron-fssdp")
except PackageNotFoundError:  # the package is imported from its sources and was never installed
    __version__ = "0+unknown"
__all__ = [
    "get_bert_layer_spec",
    "get_gpt_decoder_block_spec",
    "get_moe_module_spec",
    "register",
    "register_strategy",
    "start_session",
]


def register() -> None:
    """Add the plugin to Megatron. Call this function before Megatron parses its arguments.

    On a machine without an accelerator, this function also makes Megatron run on the CPU (see
    ``megatron_adapter.cpu.cpu_runtime``).
    """
    from megatron_fssdp.megatron_adapter.entry import registration

    registration.register()


def register_strategy(
    name: str,
    *,
    settings: Any,
    strategy: Any,
    summary: str,
    colour: str | None = None,
    candidate: bool = False,
    ranked: bool = True,
) -> None:
    """Make a strategy of your own known by its name; see ``strategy_registry.register_strategy``."""
    from megatron_fssdp.config.strategy import strategy_registry

    strategy_registry.register_strategy(
        name,
        settings=settings,
        strategy=strategy,
        summary=summary,
        colour=colour,
        candidate=candidate,
        ranked=ranked,
    )


def start_session(strategy: str, settings: Mapping[str, Any] | None = None) -> Any:
    """Start a strategy for the MoE layers of one model (see ``megatron_adapter.entry.layer_specs``).

    On a machine without an accelerator, this function also makes Megatron run on the CPU, as
    :func:`register` does. Call it before the model is built.
    """
    from megatron_fssdp.megatron_adapter.entry import layer_specs

    return layer_specs.start_session(strategy, settings)


def get_moe_module_spec(
    use_te: bool | None = None,
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    *,
    strategy: str | None = None,
    settings: Mapping[str, Any] | None = None,
    session: Any = None,
) -> Any:
    """Return Megatron's MoE module spec with a strategy (see ``megatron_adapter.entry.layer_specs``)."""
    from megatron_fssdp.megatron_adapter.entry import layer_specs

    return layer_specs.get_moe_module_spec(
        use_te, num_experts, moe_grouped_gemm, strategy=strategy, settings=settings, session=session
    )


def get_gpt_decoder_block_spec(
    config: Any,
    use_transformer_engine: bool | None = None,
    normalization: str | None = None,
    qk_l2_norm: bool | None = None,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
    *,
    strategy: str | None = None,
    settings: Mapping[str, Any] | None = None,
    session: Any = None,
) -> Any:
    """Return Megatron's decoder block spec with a strategy (see ``megatron_adapter.entry.layer_specs``).

    Call it after ``parallel_state.initialize_model_parallel``, which knows the layers of this rank.
    """
    from megatron_fssdp.megatron_adapter.entry import layer_specs

    return layer_specs.get_gpt_decoder_block_spec(
        config,
        use_transformer_engine,
        normalization,
        qk_l2_norm,
        vp_stage,
        pp_rank,
        strategy=strategy,
        settings=settings,
        session=session,
    )


def get_bert_layer_spec(
    config: Any,
    use_transformer_engine: bool | None = None,
    *,
    strategy: str | None = None,
    settings: Mapping[str, Any] | None = None,
    session: Any = None,
) -> Any:
    """Return Megatron's BERT layer spec with a strategy (see ``megatron_adapter.entry.layer_specs``)."""
    from megatron_fssdp.megatron_adapter.entry import layer_specs

    return layer_specs.get_bert_layer_spec(
        config, use_transformer_engine, strategy=strategy, settings=settings, session=session
    )
