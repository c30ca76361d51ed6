"""Checks whether planning kernels run compiled."""

from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict
from megatron_fssdp.planning.native.kernel import REBUILD, KernelForm


def check_kernels(form: KernelForm) -> Finding:
    """Say in which form planning kernels run on this machine. Both forms give the same plans.

    Args:
        form: The form in which kernels run here.
    """
    if form.is_compiled:
        return Finding("planning kernels", "compiled", Verdict.OK)
    return Finding(
        "planning kernels",
        str(form),
        Verdict.NOTE,
        "planning takes longer; install a C compiler and Python's headers, then install megatron-fssdp again "
        f"(in a checkout: {REBUILD})",
    )
