"""Bytes on the device that needs most."""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.memory.memory_accounting import (
    ExpertMemory,
    expert_memory,
    optimizer_state_bytes,
)
from megatron_fssdp.simulation.layer_ledger import LayerLedger
from megatron_fssdp.simulation.moe_job import MoeJob


@dataclass(frozen=True)
class DeviceMemory:
    """What a device holds at the peak.

    Attributes:
        experts: Parameters, gradients, optimizer, replicas and transfers of experts.
        dense_bytes: Parameters, gradients and optimizer of everything else.
        activation_bytes: Kept for the backward pass, an estimate: without attention matrices, and
            with the rows of the device that had most.
        capacity_bytes: What the device has; ``None`` if that is not known.
    """

    experts: ExpertMemory
    dense_bytes: int
    activation_bytes: int
    capacity_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.experts.total_bytes + self.dense_bytes + self.activation_bytes

    @property
    def runs_out(self) -> bool:
        """Whether it is more than the device has."""
        return self.capacity_bytes is not None and self.total_bytes > self.capacity_bytes


def device_memory(
    job: MoeJob,
    cluster: ClusterDescription,
    *,
    slots: int,
    ledger: LayerLedger | None,
    life: ReplicaLife,
) -> DeviceMemory:
    """Memory of a strategy's busiest device.

    Args:
        job: What runs.
        cluster: Says how much memory there is.
        slots: Most replicas a device may hold of a layer.
        ledger: What was decided; ``None`` for balanced loads without replicas.
        life: Of a replica; for lasting ones there is room from the start.
    """
    per_layer = job.num_experts // job.num_devices
    pairs, owned, replicas = job.pairs_per_device * job.num_layers, per_layer, 0
    if ledger is not None:
        pairs = float(ledger.tokens_ILD.sum(axis=1, dtype=np.int64).max())
        owned = int(ledger.most_owned_IL.max())
        used = slots if life is ReplicaLife.LASTING else int(ledger.most_replicas_IL.max())
        replicas = min(slots, job.num_experts - per_layer, used)
    experts = expert_memory(
        held=job.held_replicas(life),
        slots_per_device=job.num_layers * per_layer,
        replicas_per_layer=replicas,
        owned_per_layer=owned,
        expert_elements=job.expert_elements,
        dtype_bytes=job.dtype_bytes,
        gradient_bytes=job.gradient_bytes,
        optimizer=job.optimizer,
        expert_data_parallel_size=job.expert_data_parallel_size,
        chunk_bytes=job.message_bytes,
    )
    dense_bytes = job.dense_elements * (job.dtype_bytes + job.gradient_bytes) + optimizer_state_bytes(
        job.dense_elements, job.optimizer, expert_data_parallel_size=job.data_parallel_size
    )
    activation_bytes = job.activation_bytes + job.activation_bytes_per_pair * pairs / job.num_micro_batches
    return DeviceMemory(experts, dense_bytes, int(activation_bytes), cluster.memory_bytes)
