"""What the server of ranks with Megatron has imported, so that no rank imports it again."""

from functools import partial, wraps
from importlib import import_module

from megatron_fssdp import testing

TRAINING_PRELOAD = (
    *testing.MEGATRON_PRELOAD,
    "megatron.core.models.bert.bert_model",
    "megatron.core.models.bert.bert_layer_specs",
    "megatron.core.models.mimo",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.tokenizers.text.models",
    "megatron_fssdp.megatron_adapter.entry.attach",
    "megatron_fssdp.megatron_adapter.entry.launcher",
    "megatron_fssdp.megatron_adapter.entry.registration",
    "megatron_fssdp.megatron_adapter.layer.bert_layers",
    "megatron_fssdp.pretraining.pretrain_gpt",
    "numpy.ma",
    "tests.support.server_of_trainings",
)

# Without the patches for CPU ranks, for virtual devices.
VIRTUAL_PRELOAD = tuple(entry for entry in TRAINING_PRELOAD if ":" not in entry)
run_megatron_ranks = partial(testing.run_megatron_ranks, preload=TRAINING_PRELOAD)


def on_ranks(world_size, *, imported=TRAINING_PRELOAD, start=testing.run_megatron_ranks, **sizes):
    """Run all of a test on ranks, with Megatron's parallel state of these sizes."""

    def decorated(test):
        @wraps(test)
        def run(**fixtures):
            place, preload = (test.__module__, test.__name__), (*imported, test.__module__)
            start(_on_rank, world_size, *place, fixtures, preload=preload, **sizes)

        return run

    return decorated


on_plain_ranks = partial(on_ranks, imported=testing.DEFAULT_PRELOAD, start=testing.run_ranks)
# Megatron is on the CPU, and has no parallel state.
on_layer_ranks = partial(on_ranks, start=testing.run_ranks)


def _on_rank(rank, world_size, module, name, fixtures):
    getattr(import_module(module), name).__wrapped__(**fixtures)
