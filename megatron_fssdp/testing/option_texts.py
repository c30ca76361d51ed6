"""Help texts of Megatron's options, which a fork server reads once for all ranks."""

import argparse
from typing import Any


def keep_option_texts() -> None:
    """Read the help texts of Megatron's options, and keep them in this process and in those it forks.

    Megatron parses the source of its configuration classes whenever a command line is parsed, which is twice
    for each training. On a rank of a tiny training this takes much of the processor time. The texts
    depend on nothing but the class. Versions of Megatron that do not read them are left as they are.
    """
    try:
        from megatron.training.argument_utils import ArgumentGroupFactory
        from megatron.training.arguments import add_megatron_arguments
    except ImportError:
        return
    read = getattr(ArgumentGroupFactory, "_get_field_docstrings", None)
    if read is None:
        return
    texts: dict[type, dict[str, str]] = {}

    def kept(factory: Any, config_class: type) -> dict[str, str]:
        if config_class not in texts:
            texts[config_class] = read(factory, config_class)
        return dict(texts[config_class])

    ArgumentGroupFactory._get_field_docstrings = kept
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
