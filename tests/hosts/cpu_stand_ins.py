"""Lets Megatron-Bridge, ms-swift with mcore-bridge, and verl build and train models on CPU ranks.

They import Transformer Engine without a condition, and Megatron-Bridge imports NVIDIA's resiliency extension.
Empty modules and classes take their places, so that imports, ``isinstance`` and subclasses work. Layers,
models and loops remain those of the hosts, apart from the layer specification: see :func:`use_local_layers`.
"""

import functools
import importlib.machinery
import json
import os
import sys
import types
from unittest.mock import MagicMock

import torch

_ENGINE_CLASSES = ("Linear", "LayerNormLinear", "GroupedLinear", "TransformerLayer", "RMSNorm", "LayerNorm")


@functools.cache  # once in a process
def install():
    """Run Megatron on the CPU, and make both hosts possible to import; call it before that."""
    from megatron_fssdp.megatron_adapter.cpu import cpu_runtime
    from megatron_fssdp.megatron_adapter.support import megatron_repairs

    # This imports Megatron's modules, which thereby find that there is no Transformer Engine.
    assert cpu_runtime.install(), "set MEGATRON_FSSDP_DEVICE=cpu"
    megatron_repairs.install()  # for checkpoints of torch's Adam
    import megatron.core.extensions.transformer_engine as extension

    for name, value in list(vars(extension).items()):
        is_class = name.startswith("TE") or name == "SplitAlongDim"
        if is_class and (value is None or isinstance(value, MagicMock)):
            setattr(extension, name, _empty_class(name, extension.__name__))
    _add_grouped_linears(extension)
    engine = "transformer_engine"
    attention = _add_module(f"{engine}.pytorch.attention", apply_rotary_pos_emb=None, _SplitAlongDim=None)
    sequential = types.SimpleNamespace(Sequential=_empty_class("Sequential", engine))
    classes = {name: _empty_class(name, f"{engine}.pytorch") for name in _ENGINE_CLASSES}
    pytorch = _add_module(f"{engine}.pytorch", attention=attention, ops=sequential, **classes)
    _add_module(engine, pytorch=pytorch)
    inprocess = _add_module("nvidia_resiliency_ext.inprocess", CallWrapper=object)
    _add_module("nvidia_resiliency_ext", inprocess=inprocess)


def use_grouped_experts():
    """Let local layer specifications have grouped experts, whose linear layers are stand-ins of the tests."""
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    linears = GroupedMLPSubmodules(
        linear_fc1=extension.TEColumnParallelGroupedLinear, linear_fc2=extension.TERowParallelGroupedLinear
    )
    grouped = functools.partial(TEGroupedMLP, submodules=linears)
    of_local_experts = LocalSpecProvider.grouped_mlp_modules

    def grouped_mlp_modules(self, moe_use_grouped_gemm):
        return grouped if moe_use_grouped_gemm else of_local_experts(self, moe_use_grouped_gemm)

    LocalSpecProvider.grouped_mlp_modules = grouped_mlp_modules


def make_loads_uneven():
    """Let the first two experts of all layers that are built from now on get more tokens than others."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_fssdp.megatron_adapter.wrapping import wrap

    def reset_parameters(reset, router):
        reset(router)
        with torch.no_grad():
            router.weight[:2] += 0.15

    wrap(TopKRouter, "reset_parameters", reset_parameters)


def use_local_layers(module):
    """Let a host's module ask Megatron for local layers where it asks for those of Transformer Engine.

    Parameters have Transformer Engine's names, so that converters of Hugging Face weights find them: the norm
    before the attention is a part of ``linear_qkv``, and experts are grouped.
    """
    from megatron.core.transformer.identity_op import IdentityOp

    use_grouped_experts()
    of_megatron = module.get_gpt_decoder_block_spec

    @functools.wraps(of_megatron)
    def get_gpt_decoder_block_spec(config, use_transformer_engine, **rest):
        block = of_megatron(config, use_transformer_engine=False, **rest)
        for layer in block.layer_specs:
            layer.submodules.input_layernorm = IdentityOp
            layer.submodules.self_attention.submodules.linear_qkv = _linear_after_norm()
        return block

    module.get_gpt_decoder_block_spec = get_gpt_decoder_block_spec


@functools.cache
def _linear_after_norm():
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class LinearAfterNorm(ColumnParallelLinear):
        def __init__(self, input_size, output_size, *, config, **rest):
            super().__init__(input_size, output_size, config=config, **rest)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
            self.eps = config.layernorm_epsilon

        def forward(self, x, *rest, **named):
            normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)
            return super().forward(normed, *rest, **named)

    return LinearAfterNorm


def attach(strategy, settings, host=None):
    """Call ``megatron_fssdp.attach`` if a strategy is given, with settings as in slots=2,overlap_degree=3."""
    if strategy is None:
        return
    import yaml

    import megatron_fssdp

    pairs = (pair.split("=", 1) for pair in settings.split(",") if pair)
    megatron_fssdp.attach(strategy, {name: yaml.safe_load(value) for name, value in pairs}, host=host)


def say_plans():
    """Print on rank 0 what the plugin has done: iterations with known loads of each layer, and owners."""
    from megatron_fssdp.megatron_adapter.iterations.attachment import current

    for model in attachment.models if (attachment := current()) else ():
        if (session := model.session) is not None:
            seen = {layer.local.context.layer: layer.history.num_seen for layer in session.runtime.layers}
            # A save has brought experts home, and the next iteration would move them back.
            owners = session.slots.saved_owners or session.slots.owners
            say(0, iterations=model.num_done, seen=seen, moved=not owners.is_even)


def say(rank=None, **facts):
    """Print a line of JSON, on one rank or on the last one."""
    wanted = int(os.environ["WORLD_SIZE"]) - 1 if rank is None else rank
    if int(os.environ["RANK"]) == wanted:
        sys.stdout.write(f"\n{json.dumps(facts)}\n")  # Another rank may be in the middle of a line.
        sys.stdout.flush()


def norms_of_experts(weights):
    """Norms of the experts' matrices by name, as in ``model.layers.0.mlp.experts.3.up_proj.weight``."""
    return {name: weight.double().norm().item() for name, weight in sorted(weights.items())}


def _add_grouped_linears(extension):
    """Add stand-ins of the tests, whose classes tell hosts how weights are split and where adapters go."""
    from tests.megatron_adapter.grouped_linear import GroupedLinear

    def sharded_state_dict(self, axes, *rest):  # mcore-bridge calls it, and replaces the one of other name.
        return GroupedLinear.sharded_state_dict(self, *rest)

    methods = {"_sharded_state_dict_grouped": sharded_state_dict}
    grouped = extension.TEGroupedLinear = type("TEGroupedLinear", (GroupedLinear,), methods)
    for axis, way in enumerate(("Column", "Row")):
        begin = functools.partialmethod(GroupedLinear.__init__, shard_axis=axis)
        name = f"TE{way}ParallelGroupedLinear"
        setattr(extension, name, type(name, (grouped,), {"__init__": begin}))


def _empty_class(name, module):
    return type(name, (torch.nn.Module,), {"__module__": module})


def _add_module(name, **members):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__version__ = "2.20.2"
    vars(module).update(members)
    sys.modules[name] = module
    return module
