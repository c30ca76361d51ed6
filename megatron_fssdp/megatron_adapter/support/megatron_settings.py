"""What is read of Megatron's settings, typed, and which of its options are known.

``known_options.txt`` names all fields of Megatron's configs and all its arguments that were looked at. Others
may change what layers of experts do, so they may only have their defaults. A Megatron that lacks what is read
is refused too, because it may have it under another name.
"""

import copy
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache, partial
from itertools import batched, chain
from pathlib import Path
from typing import Any, Self

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.support.capabilities import pip_install

ALLOWED = "MEGATRON_FSSDP_ALLOW"  # Names of unknown options that a user allows, separated by commas.
# Names of classes: parsed arguments, and configs of megatron-core.
OPTIONAL = "optional"  # marks what Megatron 0.19, or Megatron without another package, lacks
_A, _M = frozenset({"Namespace"}), frozenset({"TransformerConfig"})
_D, _O = frozenset({"DistributedDataParallelConfig"}), frozenset({"OptimizerConfig"})
_B, _NEW = _A | _M, _A | _M | {OPTIONAL}


def _read(convert: Callable[..., Any] | None, *declared: frozenset[str] | str) -> Any:
    """A field of attributes' values, or of names, without ``convert``; classes that have them come first."""
    names = {name: of for of, text in batched(declared, 2) for name in str(text).split()}
    return field(metadata={"convert": convert, "names": names})


_value = partial(_read, lambda value: value)
_flag = partial(_read, lambda *values: any(values))
_names = partial(_read, None)
_given = partial(_read, lambda *values: any(value is not None for value in values))
_number = partial(_read, lambda *values: next(filter(None, values), 0))
_size = partial(_read, lambda *values: next(filter(None, values), 1))


class Named(str):
    """Names of the settings that are given, of several that a field reads; empty without one."""


def _weight_shards(tensor: Any, parts: Any, dense: Any, experts: Any, *sizes: Any) -> int:
    tensor = tensor or 1
    parts = parts or tensor
    return max(*(size or 1 for size in sizes), (experts or parts) // parts, (dense or tensor) // tensor)


def _captured(
    scope: Any, old_scope: Any, modules: Any, implementation: str | None, *old_flags: Any
) -> frozenset[str]:
    if (implementation or "none") == "none" and not any(old_flags):
        return frozenset()
    modules = scope or old_scope or modules or ()
    if isinstance(modules, str) or hasattr(modules, "name"):
        modules = (modules,)
    return frozenset(str(getattr(module, "name", module)) for module in modules) - {"full"} or frozenset(
        {"full"}
    )


@dataclass(frozen=True, kw_only=True)
class MegatronSettings:
    """Settings of a model and its training, from attributes that each field declares."""

    # fmt: off
    experts: int = _number(_M, "num_moe_experts", _A, "num_experts")
    devices: int = _size(_B, "expert_model_parallel_size")
    tensor_ranks: int = _size(_B, "tensor_model_parallel_size")
    # By default, the tensor-parallel ranks share an expert. GTP divides its weights further.
    parts: int = _size(_B, "expert_tensor_parallel_size tensor_model_parallel_size")
    weight_shards: int = _read(_weight_shards, _B, "tensor_model_parallel_size expert_tensor_parallel_size",
        _B, "tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards",
        _M, "gtp_weight_remat_size expert_gtp_weight_remat_size")
    equal_tokens: bool = _read(  # on all tensor-parallel ranks
        lambda ranks, sequence_parallel: (ranks or 1) > 1 and not sequence_parallel,
        _B, "tensor_model_parallel_size sequence_parallel")
    context_ranks: int = _size(_B, "context_parallel_size")
    seq_length: int = _number(_A, "seq_length")
    moe_router_load_balancing_type: Sequence[str] | None = _value(_B, "moe_router_load_balancing_type")
    moe_latent_size: int = _number(_B, "moe_latent_size")
    moe_expert_capacity_factor: float | None = _value(_B, "moe_expert_capacity_factor")
    changes_router: bool = _flag(_B, "moe_router_fusion moe_enable_routing_replay moe_router_group_topk")
    random_logits: bool = _read(  # other ones on each tensor-parallel rank
        lambda even, bias: even or bias is not None,
        _B, "moe_router_force_load_balancing moe_router_force_biased")
    pads_rows: bool = _flag(_B, "moe_router_padding_for_quantization moe_router_padding_for_fp8")
    moe_token_dispatcher_type: str | None = _value(_B, "moe_token_dispatcher_type")
    flex: str | None = _read(  # the back end of this dispatcher
        lambda kind, back_end, old: ("deepep" if old else back_end or "deepep") if kind == "flex" else None,
        _B, "moe_token_dispatcher_type moe_flex_dispatcher_backend moe_enable_deepep")
    add_bias_linear: bool = _flag(_B, "add_bias_linear")
    fp16: bool = _flag(_B | _O, "fp16")
    fp8: str | None = _value(_B, "fp8")
    fp8_recipe: str | None = _value(_B | _O, "fp8_recipe")
    fp4: str | None = _value(_B, "fp4")
    fp4_recipe: str | None = _value(_B, "fp4_recipe")
    quantizes_parameters: bool = _flag(_A | _D, "fp8_param_gather fp4_param_gather",
        _M, "fp8_param fp4_param", _A | _D | _O, "reuse_grad_buf_for_mxfp8_param_ag")
    quantizes_modules: bool = _flag(_A, "te_precision_config_file", _M, "quant_recipe use_kitchen",
        _A | {OPTIONAL}, "kitchen_config_file")
    sends_mxfp8: bool = _read(
        lambda *types: "mxfp8" in types, _NEW, "moe_dispatch_fwd_dtype moe_combine_bwd_dtype")
    moe_grouped_gemm: bool = _flag(_B, "moe_grouped_gemm")
    moe_use_grouped_tensor: bool = _flag(_NEW, "moe_use_grouped_tensor")
    one_grouped_tensor: bool = _flag(_B, "moe_single_grouped_weight moe_single_grouped_bias")
    use_transformer_engine_op_fuser: bool = _flag(_B, "use_transformer_engine_op_fuser")
    grad_reduce_in_bf16: bool = _flag(_A, "grad_reduce_in_bf16")
    uses_cutlass: bool = field(default_factory=lambda: os.environ.get("NVTE_USE_CUTLASS_GROUPED_GEMM") == "1")
    transformer_impl: str | None = _value(_B, "transformer_impl")
    delays: bool = _flag(  # weight gradients
        _B | _D, "delay_wgrad_compute", _B, "overlap_dispatch_backward_with_experts_wgrad")
    mlp_chunks_for_training: int = _size(_B, "mlp_chunks_for_training")
    moe_paged_stash: bool = _flag(_B, "moe_paged_stash")
    never_run: str = _names(_NEW, "enable_mhc_connections",
        _B, "moe_ncclep_zero_copy cpu_offloading_num_layers", _M, "enable_autocast cpu_offloading")
    cuda_graph_impl: str | None = _value(_B, "cuda_graph_impl")
    enable_cuda_graph: bool = _flag(_B, "enable_cuda_graph")
    captured: frozenset[str] = _read(  # modules; none without graphs, and "full" for whole layers
        _captured, _M | {OPTIONAL}, "cuda_graph_scope", _A, "cuda_graph_scope_deprecated",
        _B, "cuda_graph_modules cuda_graph_impl enable_cuda_graph external_cuda_graph")
    other_ddp: str = _names(_A | _D, "use_megatron_fsdp", _D, "use_custom_fsdp", _A, "use_torch_fsdp2",
        _B, "init_model_with_meta_device")
    use_mup: bool = _flag(_B, "use_mup")
    other_states: bool = _flag(_A | _O, "use_precision_aware_optimizer optimizer_cuda_graph")
    other_training: str = _names(_B, "hybrid_context_parallel",
        _A, "moe_use_upcycling perform_rl_step freeze_all_layers inprocess_restart fake_process_group")
    saves: bool = _given(_A, "save non_persistent_save_interval")
    saves_slots: str = _names(
        _A, "save_activations_interval save_dgrads_interval save_tokens_per_expert_interval")
    saves_by_name: bool = _given(_A, "save_params_interval save_wgrads_interval")
    ckpt_format: str | None = _value(_A, "ckpt_format")
    ckpt_convert_format: str | None = _value(_A, "ckpt_convert_format")
    non_persistent_ckpt_type: str | None = _value(_A, "non_persistent_ckpt_type")
    # fmt: on

    @classmethod
    def of(cls, *sources: Any) -> Self:
        """Read arguments or configs, of which the first value but ``None`` and ``False`` counts.

        A host's may lack attributes. :func:`check_known` looks at those of Megatron itself.
        """

        def value(name: str) -> Any:
            values = (getattr(source, name, None) for source in sources)
            return next((value for value in values if value is not None and value is not False), None)

        def read(convert: Callable[..., Any] | None, names: Mapping[str, Any]) -> Any:
            return convert(*map(value, names)) if convert else Named(", ".join(filter(value, names)))

        return cls(**{field.name: read(**field.metadata) for field in fields(cls) if field.metadata})

    @property
    def captures_preprocess(self) -> bool:
        """Whether a graph contains the remap to slots in its one form, and the number of slots."""
        return "moe_preprocess" in self.captured


def attributes() -> dict[str, frozenset[str]]:
    """All attributes that are read, and the classes of Megatron that have them."""
    names = (field.metadata.get("names", {}).items() for field in fields(MegatronSettings))
    return dict(chain.from_iterable(names))


@cache
def known_options() -> frozenset[str]:
    """Return the names in the file. Its sections say to readers why a name is known."""
    lines = Path(__file__).with_name("known_options.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(name for line in lines if line[:1] not in ("#", "[") for name in line.split())


def field_defaults(config: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields that megatron.core declares; hosts may add others.

    Configs of datasets do not count: what layers of experts do does not depend on them.
    """
    defaults: dict[str, Any] = {}
    for kind in reversed(type(config).__mro__):
        is_core = kind.__module__.startswith("megatron.core.")
        if is_core and not kind.__module__.startswith("megatron.core.datasets.") and is_dataclass(kind):
            for declared in fields(kind):
                made = None if declared.default_factory is MISSING else declared.default_factory()
                defaults[declared.name] = made if declared.default is MISSING else declared.default
    return defaults


def check_known(who: str, settings: Any, defaults: Mapping[str, Any] | None = None) -> None:
    """Refuse, by a ConfigurationError, an unknown option without its default that ``ALLOWED`` does not name.

    The settings are Megatron's arguments with their ``defaults``, or a config, whose classes have them.
    """
    defaults = field_defaults(settings) if defaults is None else defaults
    kinds = {kind.__name__ for kind in type(settings).__mro__} if defaults else set()
    for name, classes in attributes().items():
        if kinds & classes and OPTIONAL not in classes and name not in defaults:
            raise ConfigurationError(
                f"{who}: got a Megatron whose {type(settings).__name__} has no {name}, on which refusals "
                f"depend, wanted a tested version: {pip_install('megatron-core')}"
            )
    allowed = os.environ.get(ALLOWED, "").replace(",", " ").split()
    for name in sorted(defaults.keys() - known_options() - set(allowed)):
        default = defaults[name]
        got, wanted = (" ".join(repr(value).split()) for value in (getattr(settings, name, default), default))
        if got != wanted and not _is_derived(settings, name, default, got):
            raise ConfigurationError(
                f"{who}: {name}: got {got:.80}, which this version of megatron_fssdp does not know, wanted "
                f"its default {wanted:.80}; remove it, tell us, or set {ALLOWED}={','.join([*allowed, name])}"
            )


def _is_derived(config: Any, name: str, default: Any, got: str) -> bool:
    """Whether ``__post_init__`` of a config makes this value of the default by itself."""
    again = copy.copy(config)
    with suppress(Exception), warnings.catch_warnings(action="ignore"):
        vars(again)[name] = default  # Others may see what is set, as a teacher of Megatron-Bridge does.
        again.__post_init__()
        return " ".join(repr(getattr(again, name)).split()) == got
    return False
