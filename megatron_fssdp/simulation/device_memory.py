"""Computes the peak memory of the device that needs the most."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.planning.memory import ExpertMemory, expert_memory
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.simulation.layer_record import LayerRecord
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.replay import IterationRecord


@dataclass(frozen=True)
class DeviceMemory:
    """Peak memory of a device: experts, everything else (``dense_bytes``), and what the device has, if known.

    Activations are an estimate without attention matrices and with the rows of the most loaded device.
    """

    experts: ExpertMemory
    dense_bytes: int
    activation_bytes: int
    capacity_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """Bytes of experts, dense parameters and activations together."""
        return self.experts.total_bytes + self.dense_bytes + self.activation_bytes

    @property
    def runs_out(self) -> bool:
        """Whether the device needs more memory than it has."""
        return self.capacity_bytes is not None and self.total_bytes > self.capacity_bytes


def device_memory(
    job: MoeJob,
    cluster: ClusterDescription,
    *,
    slots: int,
    iterations: Sequence[IterationRecord[LayerRecord]] = (),
    life: ReplicaLife,
) -> DeviceMemory:
    """The peak memory of the device that needs the most under a strategy.

    A device holds at most ``slots`` replicas of one layer, as long as ``life`` says. Memory for resident
    replicas is reserved from the start. Without decisions of the strategy (``iterations``), loads are
    balanced, and there are no replicas.
    """
    per_layer = max(job.num_experts // job.num_devices, 1)
    pairs, owned, replicas = job.pairs_per_device * job.num_layers, per_layer, 0
    layers = [layer for iteration in iterations for layer in iteration.layers]
    if layers:
        pairs = max(np.sum([layer.tokens_D for layer in one.layers], axis=0).max() for one in iterations)
        owned = max(layer.most_owned for layer in layers)
        used = slots if life is ReplicaLife.RESIDENT else max(layer.most_replicas for layer in layers)
        replicas = min(slots, job.num_experts - job.num_experts // job.num_devices, used)
    experts = expert_memory(
        held=job.held_replicas(life),
        slots_per_device=-(-job.num_layers * job.num_experts // job.num_devices),
        replicas_per_layer=replicas,
        owned_per_layer=owned,
        expert_elements=job.expert_elements,
        dtype_bytes=job.dtype_bytes,
        gradient_bytes=job.gradient_bytes,
        optimizer=job.optimizer,
        expert_data_parallel_size=job.expert_data_parallel_size,
        messages=job.messages,
    )
    dense_bytes = job.dense_elements * (job.dtype_bytes + job.gradient_bytes)
    dense_bytes += job.optimizer.state_bytes(job.dense_elements, job.data_parallel_size)
    activation_bytes = job.activation_bytes + job.activation_bytes_per_pair * pairs / job.num_micro_batches
    return DeviceMemory(experts, dense_bytes, int(activation_bytes), cluster.memory_bytes)
