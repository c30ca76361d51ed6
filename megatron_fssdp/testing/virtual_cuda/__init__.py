"""Executes CUDA code paths on the CPU, with NCCL on gloo, and finds races between streams."""

from megatron_fssdp.testing.virtual_cuda.findings import DeviceEvent, EventKind, Finding, FindingKind
from megatron_fssdp.testing.virtual_cuda.session import virtual_cuda
from megatron_fssdp.testing.virtual_cuda.virtual_device import VirtualDevice

__all__ = ["DeviceEvent", "EventKind", "Finding", "FindingKind", "VirtualDevice", "virtual_cuda"]
