"""Hypothesis profiles, the selection of slow and GPU tests, and the interrupt signal of the test process."""

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

from devtools.browser import BROWSER, opened_browser

if not torch.cuda.is_available():
    # Without a GPU, Triton interprets its kernels. It reads this when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Megatron's small functions run eagerly, also in processes of tests. Each would compile them for seconds.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

_SEARCH_TIMEOUT_S = 3600

# The default suite draws the same examples every time. A search draws fresh ones, and many more. Neither
# looks at the clock: the machine is often busy with other things.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "search", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)


def pytest_addoption(parser):
    """Add the option that runs GPU tests without a GPU."""
    parser.addoption(
        "--virtual-gpu", action="store_true", help="run tests that need a GPU on a virtual CUDA device"
    )


@pytest.fixture(autouse=True)
def _virtual_gpu(request):
    """With --virtual-gpu: run a GPU test on a virtual device, which must find no race and no other fault."""
    if not request.config.option.virtual_gpu or request.node.get_closest_marker("gpu") is None:
        yield
        return
    from devtools.virtual_cuda import virtual_cuda

    with virtual_cuda() as device:
        yield
    device.assert_clean()


@pytest.fixture(scope="session")
def browser():
    """A Chromium, for tests that need one."""
    if BROWSER is None:
        pytest.skip("no Chromium found: it is not on PATH, and CHROME is not set")
    with opened_browser() as running:
        yield running


def pytest_configure(config):
    """Load a profile before any test module is imported: their settings take it as the default."""
    # Hypothesis's own plugin comes after this and loads what --hypothesis-profile names.
    settings.load_profile("search" if _selects_slow_tests(config) else "repeatable")
    # xdist would begin with files of many tests, and end with the longest ones on one core.
    config.option.loadscopereorder = False
    # A shell starts its background jobs with the interrupt signal ignored, and child processes inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config, items):
    """Select searching property tests along with the slow ones, and skip GPU tests without a GPU."""
    for item in items:
        is_property_test = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if is_property_test and not settings.default.derandomize:
            item.add_marker(pytest.mark.timeout(_SEARCH_TIMEOUT_S))
            if _selects_slow_tests(config):
                item.add_marker("slow")
        # Keywords also have the names of folders, for example that of the checkout.
        gpu_marks = list(item.iter_markers("gpu"))
        if config.option.virtual_gpu:
            # Virtual devices have no times, and processes that a test starts are not on one.
            if any(mark.kwargs.get("real") for mark in gpu_marks):
                item.add_marker(pytest.mark.skip(reason="needs a real CUDA device"))
        elif gpu_marks and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _selects_slow_tests(config):
    return "not slow" not in config.option.markexpr
