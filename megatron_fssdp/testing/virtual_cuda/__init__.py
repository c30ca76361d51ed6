"""Executes CUDA code paths on the CPU, with NCCL on gloo, and finds races between streams."""

from megatron_fssdp.testing.virtual_cuda.books.findings import DeviceEvent, EventKind, Finding, FindingKind
from megatron_fssdp.testing.virtual_cuda.books.virtual_device import VirtualDevice
from megatron_fssdp.testing.virtual_cuda.session import virtual_cuda

__all__ = ["DeviceEvent", "EventKind", "Finding", "FindingKind", "VirtualDevice", "virtual_cuda"]
