"""Generates workloads: how many tokens each device sends to each expert in each iteration.

The testbed forces this routing on real ranks, and the simulator uses it as its input. Therefore measured and
simulated figures have the same loads. Experts are placed as by Megatron: device ``d`` owns the ``E/D``
experts from ``d·E/D`` on. With fewer experts than devices, E devices own one expert each, and where a
workload names a device, it means one of these.

Shape letters: I iterations, D devices, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.planning.placement.placement import even_owners

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


@dataclass(frozen=True)
class WorkloadShape:
    """Sizes of a workload.

    Attributes:
        num_devices: Number of devices, D.
        num_experts: Number of experts, E. A multiple of D, or less than D.
        tokens_per_device: Tokens of each source device, or their mean if the devices have different numbers.
        top_k: Number of different experts of each token.
        num_iterations: Number of iterations, I.
    """

    num_devices: int
    num_experts: int
    tokens_per_device: int
    top_k: int = 2
    num_iterations: int = 1

    def __post_init__(self) -> None:
        if min(self.num_devices, self.tokens_per_device, self.top_k, self.num_iterations) < 1:
            raise ValueError(f"got {self}; wanted every size at least 1")
        if self.num_experts < 1 or (
            self.num_experts > self.num_devices and self.num_experts % self.num_devices
        ):
            raise ValueError(
                f"got {self.num_experts} experts on {self.num_devices} devices; wanted a multiple of these, "
                "or fewer experts than devices"
            )
        if self.num_experts < self.top_k:
            raise ValueError(
                f"got top_k {self.top_k} of {self.num_experts} experts; wanted at most all of them"
            )

    @property
    def experts_per_device(self) -> int:
        """Number of experts of each device that owns any: E/D, or 1 with fewer experts than devices."""
        return max(self.num_experts // self.num_devices, 1)

    @property
    def num_owners(self) -> int:
        """Number of devices that own experts."""
        return min(self.num_devices, self.num_experts)


@dataclass(frozen=True)
class Workload:
    """A named kind of routing.

    Attributes:
        name: Short name, for example ``W1``.
        description: Description of the uneven loads, in one line.
        popularity_IE: Function of a shape and a seed that returns each expert's share of all assignments,
            float64 ``[I, E]``, on any positive scale.
        tokens_D: Function of a shape that returns the tokens of every source device, int64 ``[D]``. None if
            all have the same number.
    """

    name: str
    description: str
    popularity_IE: Callable[[WorkloadShape, int], NDArray[np.float64]]
    tokens_D: Callable[[WorkloadShape], Counts] | None = None

    def counts(self, shape: WorkloadShape, seed: int = 0) -> Counts:
        """Return the assignments (token, k) of every source device to every expert: int64 ``[I, D, E]``.

        A source sends to an expert at most as many assignments as it has tokens. Therefore each token can
        have ``top_k`` different experts.

        Args:
            shape: Sizes of the workload.
            seed: Seed of random workloads.
        """
        tokens_D = (
            np.full(shape.num_devices, shape.tokens_per_device)
            if self.tokens_D is None
            else self.tokens_D(shape)
        )
        return counts_of_shares(
            np.repeat(self.popularity_IE(shape, seed)[:, None, :], shape.num_devices, axis=1),
            tokens_D,
            shape.top_k,
        )


def counts_of_shares(share_IDE: NDArray[np.float64], tokens_D: Counts, top_k: int) -> Counts:
    """Divide each source's assignments over experts by given shares, in whole numbers.

    A share above 1/top_k of a source is lowered to 1/top_k. The difference goes to the source's other experts
    in proportion to their shares, or evenly if their shares are 0. Remainders go to the largest fractions.
    Ties are broken in turn, starting where the previous source stopped, so that no expert gets the remainders
    of all sources.

    Args:
        share_IDE: Shares ``[I, D, E]`` of each source's assignments that go to each expert, on any positive
            scale.
        tokens_D: int64 ``[D]``. Tokens of every source device.
        top_k: Number of different experts of each token.

    Returns:
        int64 ``[I, D, E]``. The assignments of source ``d`` sum to ``tokens_D[d] · top_k``, and none exceeds
        ``tokens_D[d]``.

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
    for i, d in np.argwhere(left_ID > 0):
        fraction_E = wanted_IDE[i, d] - counts_IDE[i, d]
        rank_E = (np.arange(num_experts) - start_ID[i, d]) % num_experts
        order = np.lexsort((rank_E, -np.round(fraction_E, 9)))
        room = order[counts_IDE[i, d, order] < tokens_D[d]]
        counts_IDE[i, d, room[: left_ID[i, d]]] += 1
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


def expert_max_over_mean(counts_DE: Counts) -> float:
    """Return the assignments of the most popular expert divided by the mean, or 1 without assignments.

    Args:
        counts_DE: int64 ``[D, E]``. Assignments of every source device to every expert.
    """
    return _max_over_mean(counts_DE.sum(axis=0))


def device_max_over_mean(counts_DE: Counts) -> float:
    """Return the max/mean device load if every expert is computed by its owner.

    Args:
        counts_DE: int64 ``[D, E]``. Assignments of every source device to every expert.
    """
    num_devices, num_experts = counts_DE.shape
    load_D = np.zeros(num_devices, np.int64)
    np.add.at(load_D, even_owners(num_experts, num_devices), counts_DE.sum(axis=0))
    return _max_over_mean(load_D)


def _max_over_mean(load: Counts) -> float:
    return float(load.max() / load.mean()) if load.any() else 1.0


def replay(recorded_IDE: NDArray[np.integer], shape: WorkloadShape, first_iteration: int = 0) -> Counts:
    """Adapt the recorded loads of one layer to the sizes of an experiment.

    Every source keeps its shares and gets the shape's number of tokens. If the record has fewer sources R
    than the shape has devices D, neighbours share one: device ``d`` sends as source ``d·R//D`` did. If it has
    more, device ``d`` sends what sources ``d·R/D`` to ``(d+1)·R/D - 1`` sent together.

    Args:
        recorded_IDE: Integers ``[recorded iterations, R, E]``. Assignments of every source to every expert.
        shape: Sizes of the experiment.
        first_iteration: Index of the first recorded iteration to use.

    Returns:
        int64 ``[I, D, E]``. Assignments of every source device to every expert.

    Raises:
        ValueError: The record has other experts, too few iterations, or a number of sources that does not
            match.
    """
    num_recorded, num_sources, num_experts = recorded_IDE.shape
    devices, wanted = shape.num_devices, first_iteration + shape.num_iterations
    if num_experts != shape.num_experts:
        raise ValueError(
            f"the record has {num_experts} experts, wanted {shape.num_experts}; record a model with this "
            "number"
        )
    if max(devices, num_sources) % min(devices, num_sources):
        raise ValueError(
            f"cannot map {num_sources} recorded sources to {devices} devices; one must divide the other"
        )
    if first_iteration < 0 or wanted > num_recorded:
        raise ValueError(
            f"got {num_recorded} recorded iterations, wanted {first_iteration} to {wanted - 1}; replay fewer"
        )
    chosen_IDE = np.asarray(recorded_IDE[first_iteration:wanted], dtype=np.float64)
    if num_sources >= devices:
        chosen_IDE = chosen_IDE.reshape(len(chosen_IDE), devices, -1, num_experts).sum(axis=2)
    else:
        chosen_IDE = np.repeat(chosen_IDE, devices // num_sources, axis=1)
    return counts_of_shares(chosen_IDE, np.full(devices, shape.tokens_per_device), shape.top_k)


def _hot(shape: WorkloadShape, hot: list[int], share: float) -> NDArray[np.float64]:
    """Return one iteration's popularity: ``share`` on the popular experts, the rest on the others."""
    cold = shape.num_experts - len(hot)
    popularity_E = np.full(shape.num_experts, (1 - share) / cold if cold else 0.0)
    popularity_E[hot] = share / len(hot)
    return popularity_E


def _always(popularity_E: NDArray[np.float64], shape: WorkloadShape) -> NDArray[np.float64]:
    return np.tile(popularity_E, (shape.num_iterations, 1))


def _experts_of(shape: WorkloadShape, owner: int) -> list[int]:
    """Return the experts of one of the devices that own any."""
    return list(range(owner * shape.experts_per_device, (owner + 1) * shape.experts_per_device))


def _balanced(shape: WorkloadShape, seed: int) -> NDArray[np.float64]:
    return _always(np.ones(shape.num_experts), shape)


def _hot_device(shape: WorkloadShape, seed: int) -> NDArray[np.float64]:
    return _always(_hot(shape, _experts_of(shape, 0), HOT_SET_SHARE), shape)


def _hot_spread(shape: WorkloadShape, seed: int) -> NDArray[np.float64]:
    stride = max(1, shape.num_owners // shape.experts_per_device)
    # One expert on each of E/D devices, with the largest possible distance between the devices.
    hot = [
        (i * stride % shape.num_owners) * shape.experts_per_device + i * stride // shape.num_owners
        for i in range(shape.experts_per_device)
    ]
    return _always(_hot(shape, hot, HOT_SET_SHARE), shape)


def _hot_expert(shape: WorkloadShape, seed: int) -> NDArray[np.float64]:
    return _always(_hot(shape, [0], HOT_EXPERT_SHARE), shape)


def _idle(shape: WorkloadShape, seed: int) -> NDArray[np.float64]:
    popularity_E = np.ones(shape.num_experts)
    popularity_E[_experts_of(shape, shape.num_owners - 1)] = 0
    # The first expert of every second remaining device, if the device then still has another expert.
    if shape.experts_per_device > 1:
        popularity_E[0 : shape.num_experts - shape.experts_per_device : 2 * shape.experts_per_device] = 0
    return _always(popularity_E, shape)


def _rotating(shape: WorkloadShape, seed: int) -> NDArray[np.float64]:
    return np.stack(
        [
            _hot(shape, _experts_of(shape, i // ROTATION_ITERATIONS % shape.num_owners), HOT_SET_SHARE)
            for i in range(shape.num_iterations)
        ]
    )


def _bursts(shape: WorkloadShape, seed: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    hot_of_burst = rng.integers(shape.num_experts, size=-(-shape.num_iterations // BURST_PERIOD))
    even_E = np.full(shape.num_experts, 1 / shape.num_experts)
    return np.stack(
        [
            _hot(shape, [int(hot_of_burst[i // BURST_PERIOD])], HOT_EXPERT_SHARE)
            if i % BURST_PERIOD >= BURST_PERIOD - BURST_ITERATIONS
            else even_E
            for i in range(shape.num_iterations)
        ]
    )


def _log_normal(sigma: float) -> Callable[[WorkloadShape, int], NDArray[np.float64]]:
    def popularity_IE(shape: WorkloadShape, seed: int) -> NDArray[np.float64]:
        # All strengths use the same standard normal numbers, so the same experts are popular in all three.
        return _always(np.exp(sigma * np.random.default_rng(seed).normal(size=shape.num_experts)), shape)

    return popularity_IE


def _ragged_tokens(shape: WorkloadShape) -> Counts:
    """Return tokens in proportion to 1, 2, … D, with the mean of the shape: int64 ``[D]``."""
    devices = shape.num_devices
    ends = np.cumsum(np.arange(1, devices + 1)) * (shape.tokens_per_device * devices)
    return np.diff(ends // (devices * (devices + 1) // 2), prepend=0)


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("W0", "balanced", _balanced),
        Workload("W1", "half of all assignments go to the experts of device 0", _hot_device),
        Workload("W2", "as W1, but every popular expert is on another device", _hot_spread),
        Workload("W3", "two fifths of all assignments go to expert 0", _hot_expert),
        Workload(
            "W4",
            "balanced experts; devices have tokens in proportion to 1, 2, … D",
            _balanced,
            _ragged_tokens,
        ),
        Workload("W5", "the last device and one expert of every second other device are idle", _idle),
        Workload("W6", "as W1, but the overloaded device changes every 3 iterations", _rotating),
        Workload("W7", "balanced, but in 2 of 5 iterations as W3 with a random expert", _bursts),
        *(
            Workload(
                f"lognormal-{strength}",
                f"popularity of experts is log-normal with sigma {sigma}",
                _log_normal(sigma),
            )
            for strength, sigma in LOG_NORMAL_SIGMAS.items()
        ),
    )
}
"""All generated workloads by name. :func:`replay` makes a workload from recorded loads."""
