"""The help texts of Megatron's options are read once, and they are the texts that Megatron would read."""

import argparse
import importlib.util
import inspect

from megatron_fssdp.testing import MEGATRON_PRELOAD, run_ranks


def _texts_of_a_rank(rank: int, world_size: int) -> tuple[dict[str, str], dict[str, str]]:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training import argument_utils

    spec = importlib.util.spec_from_file_location("untouched_argument_utils", argument_utils.__file__)
    assert spec is not None
    assert spec.loader is not None
    untouched = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(untouched)
    return (
        argument_utils.ArgumentGroupFactory(TransformerConfig).field_docstrings,
        untouched.ArgumentGroupFactory(TransformerConfig).field_docstrings,
    )


def _help_without_sources(rank: int, world_size: int) -> dict[str, str | None]:
    from megatron.training.arguments import add_megatron_arguments

    def refuse(*_: object) -> str:
        raise AssertionError("a source was read")

    inspect.getsource = refuse
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {action.dest: action.help for action in parser._actions}


def test_a_rank_has_the_texts_that_megatron_reads() -> None:
    ((kept, read),) = run_ranks(_texts_of_a_rank, 1, preload=MEGATRON_PRELOAD)
    assert len(kept) > 100
    assert kept == read


def test_a_rank_parses_a_command_line_without_reading_sources() -> None:
    (helps,) = run_ranks(_help_without_sources, 1, preload=MEGATRON_PRELOAD)
    assert helps["hidden_size"]
    assert len(helps) > 500
