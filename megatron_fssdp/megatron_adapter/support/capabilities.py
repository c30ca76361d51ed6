"""Tested versions, and the seams: what the plugin attaches to in Megatron.

The check of seams looks for names and ignores the version number. A fork or a nightly build that has all of
them works. A release that lacks one is refused before anything runs.
"""

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError

# For pip. pyproject.toml repeats them, and a test compares.
TESTED_VERSIONS = {
    "python": ">=3.12",
    "torch": ">=2.6",
    "megatron-core": ">=0.19,<0.21",
    "transformer-engine": ">=2.1",
}


def pip_install(distribution: str) -> str:
    """Return the command that installs a tested version of a distribution."""
    return f"pip install '{distribution}{TESTED_VERSIONS[distribution]}'"


SEAMS = {
    "megatron.core.pipeline_parallel.schedules": """forward_backward_no_pipelining
        forward_backward_pipelining_with_interleaving forward_backward_pipelining_without_interleaving""",
    "megatron.core.optimizer.optimizer": """ChainedOptimizer.step MixedPrecisionOptimizer.step
        FP32Optimizer.step MegatronOptimizer.prepare_grads MegatronOptimizer.get_grad_norm
        MegatronOptimizer.step_with_ready_grads""",
    "megatron.core.optimizer.distrib_optimizer": """DistributedOptimizer._get_model_param_range_map
        DistributedOptimizer.sharded_param_state_dp_reshardable
        DistributedOptimizer.sharded_param_state_dp_zero""",
    "megatron.core.distributed": """DistributedDataParallel.enable_forward_pre_hook
        DistributedDataParallel._make_backward_post_hook DistributedDataParallel.scale_gradients
        DistributedDataParallel.expert_parallel_bucket_groups
        DistributedDataParallel.remove_forward_pre_hook_handles
        DistributedDataParallel.overlap_param_gather_with_optimizer_step""",
    "megatron.core.distributed.param_and_grad_buffer": """_ParamAndGradBuffer.reset
        _ParamAndGradBucketGroup.start_grad_sync _ParamAndGradBucketGroup.finish_grad_sync
        _ParamAndGradBucketGroup.finish_param_sync""",
    "megatron.core.transformer.moe.moe_layer": """MoELayer.route MoELayer.preprocess MoELayer.dispatch
        MoELayer.postprocess""",
    "megatron.core.transformer.moe.router": "TopKRouter.router_replay",
    "megatron.core.transformer.moe.token_dispatcher": "MoETokenDispatcher.dispatch_preprocess",
    "megatron.core.transformer.transformer_layer": """TransformerLayer.mlp TransformerLayer._forward_attention
        TransformerLayer._te_cuda_graph_replay""",
    "megatron.core.transformer.multi_token_prediction": "MultiTokenPredictionLayer",
    "megatron.core.transformer.cuda_graphs": "is_graph_capturing",
    "megatron.core.dist_checkpointing.serialization": """save_preprocess load_preprocess
        load_common_state_dict""",
    "megatron.core.datasets.utils": "compile_helpers",
    "megatron.training.arguments": "add_megatron_arguments parse_args validate_args",
    "megatron.training.training": "train num_floating_point_operations",
}
"""Classes, functions and attributes that every run needs, by module; the code beside each says why."""


def missing_seams(*, for_training: bool) -> dict[str, Exception]:
    """Return seams that Megatron lacks, with the errors; those of its training loop only if asked."""
    missing: dict[str, Exception] = {}
    for module, names in SEAMS.items():
        for path in names.split() if for_training or module.startswith("megatron.core.") else ():
            try:
                target: Any = importlib.import_module(module)
                for name in path.split("."):
                    target = None if _assigns(target, name) else getattr(target, name)
            except Exception as error:  # A module of Megatron may raise any error when it is imported.
                missing[f"{module}.{path}"] = error
    return missing


def check_seams(*, for_training: bool) -> None:
    """Raise a ConfigurationError unless Megatron has all seams, also those of its training loop if asked."""
    for seam, error in missing_seams(for_training=for_training).items():
        try:  # A checkout may come before the installed package, whose metadata have another version.
            core = f"megatron-core {importlib.import_module('megatron.core').__version__}"
        except Exception:
            core = "no megatron-core"
        raise ConfigurationError(
            f"Megatron: got {core} without {seam} ({error}), to which the plugin attaches; wanted a release "
            f"in the tested range: {pip_install('megatron-core')}"
        )


@contextmanager
def naming_missing_seams() -> Iterator[None]:
    """Surround imports of our modules, which fail without Megatron or under an old one."""
    try:
        yield
    except (ImportError, AttributeError):
        check_seams(for_training=False)
        raise


def _assigns(owner: object, name: str) -> bool:
    """Whether a class has no attribute ``name``, but its methods use it as an attribute of instances."""
    if not isinstance(owner, type) or hasattr(owner, name):
        return False
    methods = (inspect.unwrap(method) for base in owner.__mro__ for method in vars(base).values())
    return any(name in method.__code__.co_names for method in methods if inspect.isfunction(method))
