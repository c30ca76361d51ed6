"""Tested versions, and the seams: what the plugin attaches to in Megatron.

The check of seams looks for names and ignores the version number. A fork or a nightly build that has all of
them works. A release that lacks one is refused before anything runs.
"""

import importlib
import importlib.metadata
import inspect
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron_fssdp.config.errors import ConfigurationError

# For pip. pyproject.toml repeats them, and a test compares.
TESTED_VERSIONS = {
    "python": ">=3.12",
    "torch": ">=2.6",
    "megatron-core": ">=0.19,<0.21",
    "transformer-engine": ">=2.1",
}


def is_tested(distribution: str, version: str) -> bool:
    """Whether a version is tested. Suffixes are ignored: ``2.6.0a0+git`` counts as 2.6.0."""
    try:
        return SpecifierSet(TESTED_VERSIONS[distribution]).contains(Version(version).base_version)
    except InvalidVersion:
        return False


def pip_install(distribution: str) -> str:
    """Return the command that installs a tested version of a distribution."""
    return f"pip install '{distribution}{TESTED_VERSIONS[distribution]}'"


class Seam(NamedTuple):
    """A class, function or attribute of Megatron that the plugin attaches to."""

    module: str
    path: str  # in the module, for example MoELayer.route
    purpose: str  # completes a sentence "the plugin ..."
    needed_by: str  # runs, strategies or options that do not work without it
    is_optional: bool = False  # a single feature needs it, which checks it when it is requested


_NEEDED_BY = {
    "every": "every run, --moe-strategy none included",
    "placement": "every strategy but none",
    "parallel": "every strategy but none, on two or more expert-parallel ranks",
    "moving": "re-sharding (fssdp, smartmoe) and resident replicas (flexmoe)",
    "states": "the distributed optimizer under re-sharding (fssdp, smartmoe) and resident replicas (flexmoe)",
    "gather": "--overlap-param-gather under every strategy but none",
    "topology": "router=topology_aware",
    "bert": "BERT with --num-experts",
}
_OPTIONAL = ("topology", "bert")


def _seams(table: str) -> tuple[Seam, ...]:
    """Seams from lines ``path | purpose | key of _NEEDED_BY`` under the name of their module."""
    seams, module = list[Seam](), ""
    for line in table.strip().splitlines():
        path, *rest = (cell.strip() for cell in line.split("|"))
        if rest:
            seams.append(Seam(module, path, rest[0], _NEEDED_BY[rest[1]], rest[1] in _OPTIONAL))
        else:
            module = path
    return tuple(seams)


SEAMS = _seams(
    """
    megatron.core.pipeline_parallel.schedules
      forward_backward_no_pipelining | begins iterations and evaluations | every
      forward_backward_pipelining_with_interleaving | begins iterations and evaluations | every
      forward_backward_pipelining_without_interleaving | begins iterations and evaluations | every
    megatron.core.optimizer.optimizer
      ChainedOptimizer.step | ends iterations | every
      MixedPrecisionOptimizer.step | ends iterations | every
      FP32Optimizer.step | ends iterations | every
      MegatronOptimizer.prepare_grads | completes expert gradients before | placement
      MegatronOptimizer.get_grad_norm | completes expert gradients before | placement
    megatron.core.transformer.moe.moe_layer
      MoELayer.route | divides the tokens of tensor-parallel ranks that have the same ones | placement
      MoELayer.preprocess | turns the routing of experts into that of slots | placement
      MoELayer.dispatch | prepares the next layer while tokens travel | placement
      MoELayer.postprocess | starts the next layer's transfers | placement
    megatron.core.transformer.cuda_graphs
      is_graph_capturing | keeps the plan of a CUDA graph in place | placement
    megatron.core.transformer.moe.token_dispatcher
      MoETokenDispatcher.dispatch_preprocess | permutes tokens by a map of slots | placement
    megatron.core.distributed.param_and_grad_buffer
      _ParamAndGradBuffer.reset | drops the sums of replicas with the gradients | placement
      _ParamAndGradBucketGroup.start_grad_sync | waits for complete expert gradients | parallel
      _ParamAndGradBucketGroup.finish_grad_sync | completes expert gradients before their reduction | parallel
      _ParamAndGradBucketGroup.finish_param_sync | ends the gather of parameters before experts move | moving
    megatron.core.distributed
      DistributedDataParallel._make_forward_pre_hook | gathers parameters before replicas | gather
      DistributedDataParallel._make_backward_post_hook | waits for what DDP adds to gradients | parallel
      DistributedDataParallel.scale_gradients | completes expert gradients before | placement
      DistributedDataParallel.expert_parallel_bucket_groups | ends it before experts move | moving
      DistributedDataParallel.remove_forward_pre_hook_handles | ends it before experts move | moving
      DistributedDataParallel.overlap_param_gather_with_optimizer_step | ends it before experts move | moving
    megatron.core.datasets.utils
      compile_helpers | uses compiled dataset helpers where there are some | every
    megatron.training.arguments
      add_megatron_arguments | adds its command-line arguments | every
      parse_args | checks that its arguments were parsed | every
      validate_args | checks its arguments | every
    megatron.training.global_vars
      build_tokenizer | names a tokenizer that Megatron cannot load | every
    megatron.training.training
      train | reports where a run stopped | placement
      num_floating_point_operations | records the operations of an iteration | every
    megatron.core.transformer.multi_token_prediction
      MultiTokenPredictionLayer | numbers its layers of experts after the decoder's | placement
    megatron.core.transformer.transformer_layer
      TransformerLayer.mlp | starts to gather experts while attention computes | placement
      TransformerLayer._forward_attention | starts it in the combined schedule | placement
      TransformerLayer._te_cuda_graph_replay | starts it before a CUDA graph of attention | placement
    megatron.core.optimizer.distrib_optimizer
      DistributedOptimizer._get_model_param_range_map | moves optimizer states between devices | states
    megatron.core.dist_checkpointing.serialization
      save_preprocess | saves loads and the owner map with experts | placement
      load_preprocess | loads them with experts | placement
      load_common_state_dict | loads them with experts | placement
    megatron.core.transformer.moe.router
      TopKRouter.router_replay | selects experts by the nodes of their owners | topology
    megatron.core.models.bert.bert_model
      BertModel | adds experts to its layers | bert
    """
)
"""All seams, those of single features last."""


def absence(seam: Seam) -> Exception | None:
    """Return the error from looking up a seam in the installed Megatron; ``None`` if Megatron has it."""
    try:
        found: Any = importlib.import_module(seam.module)
        for name in seam.path.split("."):
            found = None if _assigns(found, name) else getattr(found, name)
    except Exception as error:  # A module of Megatron may raise any error when it is imported.
        return error
    return None


def check_seams(*, for_training: bool) -> None:
    """Raise a ConfigurationError unless Megatron has all seams, also those of its training loop if asked."""
    for seam in SEAMS:
        if seam.is_optional or not (for_training or seam.module.startswith("megatron.core.")):
            continue
        if (error := absence(seam)) is not None:
            try:
                found = f"megatron-core {importlib.metadata.version('megatron-core')}"
            except importlib.metadata.PackageNotFoundError:
                found = "no megatron-core"
            raise ConfigurationError(
                f"Megatron: got {found} without {seam.module}.{seam.path} ({error}), where the plugin "
                f"{seam.purpose}; wanted a release in the tested range: {pip_install('megatron-core')}"
            ) from None


def _assigns(owner: object, name: str) -> bool:
    """Whether a class has no attribute ``name``, but its methods use it as an attribute of instances."""
    if not isinstance(owner, type) or hasattr(owner, name):
        return False
    methods = (inspect.unwrap(method) for base in owner.__mro__ for method in vars(base).values())
    return any(name in method.__code__.co_names for method in methods if inspect.isfunction(method))


def one_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
