"""What the server of ranks with Megatron has imported, so that no rank imports it again."""

from functools import partial

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
