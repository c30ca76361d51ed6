"""Makes the server that imports this module faster: what each rank of a training would do is done once."""

import argparse
import warnings
import weakref
from functools import cache, partial
from pkgutil import resolve_name

import torch
from megatron.training import ft_integration, initialize
from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES

# Megatron reads its options' help texts twice.
_read = cache(partial(ArgumentGroupFactory._get_field_docstrings, ArgumentGroupFactory))
ArgumentGroupFactory._get_field_docstrings = staticmethod(_read)
add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
for entry in STRATEGIES.values():
    if entry.strategy is not None:
        resolve_name(entry.strategy)
# Megatron would run its fused functions once, for a compiler that tests do not use.
initialize._warmup_jit_function = lambda tp_size: None
# It would parse all arguments again, for a package that is not there.
ft_integration.setup = lambda: None
# Each rank would read the line of a file that warns.
warnings.simplefilter("ignore")
# Each seed would be kept for devices of other kinds, with a printed stack.
torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None
# When a rank ends, it would take back all that libraries have registered with torch.
for finalizer in list(weakref.finalize._registry):
    finalizer.atexit = False
