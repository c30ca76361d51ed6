"""What the server of ranks that train has imported and done."""

import argparse
from functools import cache, partial

from megatron_fssdp.testing import MEGATRON_PRELOAD

TRAINING_PRELOAD = (
    *MEGATRON_PRELOAD,
    "megatron.core.models.bert.bert_model",
    "megatron.core.models.mimo",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.tokenizers.text",
    "megatron_fssdp.megatron_adapter.entry.launcher",
    "megatron_fssdp.megatron_adapter.entry.registration",
    "megatron_fssdp.strategies.fssdp.fssdp_strategy",
    "tests.support.training_preload:keep_option_texts",
)


def keep_option_texts() -> None:
    """Let Megatron read its options' help texts once, and not twice on each rank of a training."""
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    read = cache(partial(ArgumentGroupFactory._get_field_docstrings, ArgumentGroupFactory))
    ArgumentGroupFactory._get_field_docstrings = staticmethod(read)
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
