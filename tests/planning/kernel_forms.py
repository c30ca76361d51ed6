"""Calls a kernel in both of its forms, where both exist."""

import numpy as np
import pytest

from megatron_fssdp.planning.native.kernel import Kernel, kernel_form

needs_compiled = pytest.mark.skipif(
    not kernel_form().is_compiled, reason=f"planning kernels: {kernel_form()}; nothing to compare with"
)


def answers_of_both_forms(kernel: Kernel, arguments: tuple) -> list[tuple]:
    """Result of a kernel, and all arrays after it ran: first of the plain form, then of the compiled one."""
    answers = []
    for is_compiled in (False, True):
        own = tuple(a.copy() if isinstance(a, np.ndarray) else a for a in arguments)
        form = Kernel(kernel.plain)
        form.select_form(is_compiled)
        result = form(*own)
        answers.append((result, *(a.tolist() if isinstance(a, np.ndarray) else a for a in own)))
    return answers
