"""Executes CUDA code paths on the CPU, with NCCL on gloo, and finds races between streams."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported.

from devtools.virtual_cuda.books.findings import DeviceEvent, EventKind, Finding, FindingKind
from devtools.virtual_cuda.books.virtual_device import VirtualDevice
from devtools.virtual_cuda.session import virtual_cuda

__all__ = ["DeviceEvent", "EventKind", "Finding", "FindingKind", "VirtualDevice", "virtual_cuda"]
