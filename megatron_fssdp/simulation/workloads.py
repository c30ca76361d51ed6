"""Loads for a job: generated workloads, and records that are adapted to its sizes.

The testbed forces generated routing on real ranks, and the simulator uses it as its input. Therefore measured
and simulated figures have the same loads. Experts are placed as by Megatron: device ``d`` owns the ``E/D``
experts from ``d·E/D`` on. With fewer experts than devices, E devices own one expert each, and where a
workload names a device, it means one of these.

Shape letters: I iterations, Z micro-batches, L MoE layers, D devices, E experts.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.simulation.moe_job import MoeJob

Counts = NDArray[np.int64]

HOT_SET_SHARE = 0.5
"""Share of all assignments that W1's popular experts have together."""
HOT_EXPERT_SHARE = 0.4
"""Share of all assignments that W3's popular expert has."""
ROTATION_ITERATIONS = 3
"""Number of iterations after which W6's overloaded device changes."""
BURST_PERIOD, BURST_ITERATIONS = 5, 2
"""W7: length of a period in iterations, and the number of iterations at its end that are a burst."""
LOG_NORMAL_SIGMAS = {"weak": 0.5, "medium": 1.0, "strong": 1.5}
"""Standard deviations of the logarithm of experts' popularity."""
DRIFT_SIGMA = 0.3
"""Standard deviation of the logarithm of what an expert's load is multiplied by in a micro-batch of drift."""


@dataclass(frozen=True)
class WorkloadShape:
    """Sizes of a workload: the experts are a multiple of the devices, or fewer.

    ``tokens_per_device`` are those of an iteration, and a mean if the devices have different numbers.

    Raises:
        ValueError: The sizes do not fit each other.
    """

    num_devices: int
    num_experts: int
    tokens_per_device: int
    top_k: int = 2
    num_iterations: int = 1
    num_micro_batches: int = 1

    def __post_init__(self) -> None:
        sizes = (self.num_devices, self.tokens_per_device, self.top_k, self.num_iterations)
        is_uneven = self.num_experts > self.num_devices and self.num_experts % self.num_devices
        is_cut = self.num_micro_batches < 1 or self.tokens_per_device % self.num_micro_batches
        if min(sizes) < 1 or self.num_experts < self.top_k or is_uneven or is_cut:
            raise ValueError(
                f"got {self}; wanted sizes of at least 1, at least top_k experts, as many experts as a "
                "multiple of the devices, or fewer than devices, and tokens as a multiple of micro-batches"
            )


@dataclass(frozen=True)
class Workload:
    """A named kind of routing, for example ``W1``, with a description of the uneven loads in one line."""

    name: str
    description: str

    def counts(self, shape: WorkloadShape, seed: int = 0) -> Counts:
        """The assignments (token, k) of every source device to every expert: int64 ``[I, D, E]``."""
        return self.micro_batches(shape, seed).sum(axis=1)

    def micro_batches(self, shape: WorkloadShape, seed: int = 0) -> Counts:
        """The assignments of every micro-batch, int64 ``[I, Z, D, E]``; if all are equal, Z is 1.

        This one entry then has all assignments of an iteration. A source sends an expert at most as many as
        it has tokens, so each token can have ``top_k`` different experts. The seed is that of random
        workloads.
        """
        devices, popularity_IZE = shape.num_devices, self._popularity_IZE(shape, seed)
        tokens_D = np.full(devices, shape.tokens_per_device // popularity_IZE.shape[1])
        if self.name == "W4":
            ends = np.cumsum(np.arange(1, devices + 1)) * (shape.tokens_per_device * devices)
            tokens_D = np.diff(ends // (devices * (devices + 1) // 2), prepend=0)
        # Most workloads repeat few kinds of iterations.
        kinds_IE, kind_I = np.unique(
            popularity_IZE.reshape(-1, shape.num_experts), axis=0, return_inverse=True
        )
        counts_IDE = counts_of_shares(np.repeat(kinds_IE[:, None], devices, axis=1), tokens_D, shape.top_k)
        return counts_IDE[kind_I.reshape(-1)].reshape(*popularity_IZE.shape[:2], devices, -1)

    def _popularity_IZE(self, shape: WorkloadShape, seed: int) -> NDArray[np.float64]:
        """Each expert's share of all assignments on any positive scale, float64 ``[I, Z, E]``."""
        experts, owners = shape.num_experts, min(shape.num_devices, shape.num_experts)
        of_device, iterations = experts // owners, range(shape.num_iterations)
        micro_batches = shape.num_iterations, shape.num_micro_batches
        rng, always_E = np.random.default_rng(seed), np.full(experts, 1 / experts)

        def hot(numbers: list[int], share: float) -> NDArray[np.float64]:
            """Popularity with ``share`` on these experts, and the rest on the others."""
            cold = experts - len(numbers)
            popularity_E = np.full(experts, (1 - share) / cold if cold else 0.0)
            popularity_E[numbers] = share / len(numbers)
            return popularity_E

        def hot_device(device: int) -> NDArray[np.float64]:
            return hot(list(range(device * of_device, (device + 1) * of_device)), HOT_SET_SHARE)

        if self.name == "W1":
            always_E = hot_device(0)
        elif self.name == "W2":
            # One expert on each of E/D devices, with the largest possible distance between the devices.
            places = np.arange(of_device) * max(1, owners // of_device)
            always_E = hot((places % owners * of_device + places // owners).tolist(), HOT_SET_SHARE)
        elif self.name == "W3":
            always_E = hot([0], HOT_EXPERT_SHARE)
        elif self.name == "W5":
            always_E = np.ones(experts)
            always_E[(owners - 1) * of_device :] = 0
            # The first expert of every second remaining device, if the device then still has another expert.
            if of_device > 1:
                always_E[0 : experts - of_device : 2 * of_device] = 0
        elif self.name == "W6":
            return np.stack([[hot_device(i // ROTATION_ITERATIONS % owners)] for i in iterations])
        elif self.name == "jump-micro":
            # Every step leads to any other device.
            steps = rng.integers(1, max(owners, 2), size=shape.num_iterations * shape.num_micro_batches)
            popularity = [hot_device(device) for device in (np.cumsum(steps) % owners).tolist()]
            return np.reshape(popularity, (*micro_batches, experts))
        elif self.name == "W7":
            hot_of_burst = rng.integers(experts, size=-(-shape.num_iterations // BURST_PERIOD)).tolist()
            bursts = [hot([expert], HOT_EXPERT_SHARE) for expert in hot_of_burst]
            quiet = BURST_PERIOD - BURST_ITERATIONS
            return np.stack(
                [[bursts[i // BURST_PERIOD] if i % BURST_PERIOD >= quiet else always_E] for i in iterations]
            )
        elif self.name.startswith("lognormal-"):
            # All strengths use the same standard normal numbers, so the same experts are popular in all.
            sigma = LOG_NORMAL_SIGMAS[self.name.removeprefix("lognormal-")]
            always_E = np.exp(sigma * rng.normal(size=experts))
        elif self.name == "drift":
            always_E = np.exp(LOG_NORMAL_SIGMAS["medium"] * rng.normal(size=experts))
            return always_E * np.exp(DRIFT_SIGMA * rng.normal(size=(*micro_batches, experts)))
        return np.tile(always_E, (shape.num_iterations, 1, 1))


def counts_of_shares(share_IDE: NDArray[np.float64], tokens_D: Counts, top_k: int) -> Counts:
    """Divide each source's ``tokens_D · top_k`` assignments by shares, in whole numbers: int64 ``[I, D, E]``.

    No expert gets more than the source's tokens: a share above 1/top_k is lowered to it, and the difference
    goes to the source's other experts in proportion to their shares, or evenly if their shares are 0.
    Remainders go to the largest fractions. Ties are broken in turn, starting where the previous source
    stopped, so that no expert gets the remainders of all sources. The shares ``[I, D, E]`` are on any
    positive scale.

    Raises:
        ValueError: A source has negative shares, or all of its shares are 0.
    """
    share_IDE = np.asarray(share_IDE, dtype=np.float64)
    num_experts = share_IDE.shape[2]
    if np.any(share_IDE < 0) or np.any(share_IDE.sum(axis=2) <= 0):
        raise ValueError(
            "got a source device with negative shares or a sum of 0; wanted shares >= 0 with a sum > 0"
        )
    capped_IDE = _capped(share_IDE / share_IDE.sum(axis=2, keepdims=True), 1 / top_k)
    wanted_IDE = capped_IDE * (tokens_D * top_k)[None, :, None]
    counts_IDE = np.minimum(np.floor(wanted_IDE + 1e-9).astype(np.int64), tokens_D[None, :, None])
    left_ID = tokens_D[None, :] * top_k - counts_IDE.sum(axis=2)
    start_ID = np.cumsum(left_ID, axis=1) - left_ID
    for counts_DE, wanted_DE, left_D, start_D in zip(counts_IDE, wanted_IDE, left_ID, start_ID, strict=True):
        rank_DE = (np.arange(num_experts) - start_D[:, None]) % num_experts
        order_DE = np.lexsort((rank_DE, -np.round(wanted_DE - counts_DE, 9)))
        has_room_DE = np.take_along_axis(counts_DE < tokens_D[:, None], order_DE, axis=1)
        gets_DE = has_room_DE & (np.cumsum(has_room_DE, axis=1) <= left_D[:, None])
        counts_DE += np.take_along_axis(gets_DE, np.argsort(order_DE, axis=1), axis=1)
    return counts_IDE


def _capped(share_IDE: NDArray[np.float64], cap: float) -> NDArray[np.float64]:
    share_IDE = share_IDE.copy()
    for _ in range(share_IDE.shape[2]):
        excess = np.maximum(share_IDE - cap, 0).sum(axis=2, keepdims=True)
        if not np.any(excess > 1e-12):
            break
        share_IDE = np.minimum(share_IDE, cap)
        below = share_IDE < cap
        base = np.where(below, share_IDE, 0.0)
        total = base.sum(axis=2, keepdims=True)
        even = below / np.maximum(below.sum(axis=2, keepdims=True), 1)
        share_IDE += excess * np.where(total > 0, base / np.where(total > 0, total, 1.0), even)
    return share_IDE


_DESCRIPTIONS = {
    "W0": "balanced",
    "W1": "half of all assignments go to the experts of device 0",
    "W2": "as W1, but every popular expert is on another device",
    "W3": "two fifths of all assignments go to expert 0",
    "W4": "balanced experts; devices have tokens in proportion to 1, 2, … D",
    "W5": "the last device and one expert of every second other device are idle",
    "W6": "as W1, but the overloaded device changes every 3 iterations",
    "W7": "balanced, but in 2 of 5 iterations as W3 with a random expert",
    **{
        f"lognormal-{strength}": f"popularity of experts is log-normal with sigma {sigma}"
        for strength, sigma in LOG_NORMAL_SIGMAS.items()
    },
    "drift": f"as lognormal-medium, with noise of sigma {DRIFT_SIGMA} in the loads of every micro-batch",
    "jump-micro": "as W1, but each micro-batch overloads another, random device",
}

WORKLOADS = {name: Workload(name, description) for name, description in _DESCRIPTIONS.items()}
"""All generated workloads by name."""


def generated_loads(name: str, job: MoeJob, num_iterations: int, seed: int = 0) -> np.ndarray:
    """A workload of ``WORKLOADS`` for every layer of a job: (token, k) pairs, int32 ``[I, L, D, E]``.

    If micro-batches differ, it is ``[I, Z, L, D, E]``. ``seed`` is that of the first layer; each next layer
    uses the next number.
    """
    shape = WorkloadShape(
        num_devices=job.num_devices,
        num_experts=job.num_experts,
        tokens_per_device=max(1, round(job.tokens_per_micro_batch)) * job.num_micro_batches,
        top_k=job.top_k,
        num_iterations=num_iterations,
        num_micro_batches=job.num_micro_batches,
    )
    layers = [WORKLOADS[name].micro_batches(shape, seed + layer) for layer in range(job.num_layers)]
    counts_IZLDE = np.stack(layers, axis=2).astype(np.int32)
    return counts_IZLDE if counts_IZLDE.shape[1] > 1 else counts_IZLDE[:, 0]


def fitted_loads(counts_ILDE: np.ndarray, job: MoeJob) -> tuple[np.ndarray, float]:
    """Adapt recorded loads, integers ``[I, L, sources, E]``, to a job with other devices or tokens.

    Those of micro-batches, ``[I, Z, L, sources, E]``, are joined to the job's number of them. With fewer
    source devices than the job has, neighbouring devices get the same counts. With more, the counts of
    neighbours are added. All counts are then scaled, so that the mean device has the job's number of tokens.
    The result is int32 ``[I, L, D, E]`` or ``[I, Z, L, D, E]``, and the factor of this scaling.

    Raises:
        ConfigurationError: The record has other layers or experts than the job, or no matching devices or
            micro-batches.
    """
    if counts_ILDE.ndim == 5:
        recorded, wanted = counts_ILDE.shape[1], job.num_micro_batches
        if recorded % wanted:
            raise ConfigurationError(
                f"--loads: got a record of {recorded} micro-batches for {wanted}; the latter must divide the "
                "former, so change the batch size"
            )
        by_job = counts_ILDE.reshape(len(counts_ILDE), wanted, -1, *counts_ILDE.shape[2:])
        counts_ILDE = by_job.sum(axis=2)
    num_iterations, *micro_batches, num_layers, num_sources, num_experts = counts_ILDE.shape
    if (num_layers, num_experts) != (job.num_layers, job.num_experts) or not num_iterations:
        raise ConfigurationError(
            f"--loads: got {num_iterations} recorded iterations of {num_layers} MoE layers with "
            f"{num_experts} experts, wanted at least one of {job.num_layers} layers with {job.num_experts} "
            "experts, as in --model; give the run's own model"
        )
    wanted = job.num_devices
    if max(wanted, num_sources) % min(wanted, num_sources):
        raise ConfigurationError(
            f"--loads: got a record of {num_sources} devices, but the model has "
            f"parallelism.expert_model_parallel_size {wanted}; one must divide the other, so change it"
        )
    if wanted < num_sources:
        counts_ILDE = counts_ILDE.reshape(*counts_ILDE.shape[:-2], wanted, -1, num_experts).sum(axis=-2)
    elif wanted > num_sources:
        counts_ILDE = np.repeat(counts_ILDE, wanted // num_sources, axis=-2)
    mean = float(counts_ILDE.sum(axis=-1, dtype=np.int64).mean()) * math.prod(micro_batches)
    if mean <= 0:
        raise ConfigurationError("--loads: the record has no tokens; record the run again")
    factor = job.pairs_per_device / mean
    if abs(factor - 1) < 1e-3:
        return counts_ILDE.astype(np.int32, copy=False), 1.0
    return np.rint(counts_ILDE * factor).astype(np.int32), factor
