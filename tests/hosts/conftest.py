"""One process for each host, which runs its script on forked ranks, and comparisons with stock runs."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.hosts.forked_ranks import Host, Run

NEEDED = {"bridge": "megatron.bridge", "swift": "swift.megatron"}


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    name = request.module.HOST
    try:
        is_missing = find_spec(NEEDED[name]) is None
    except ModuleNotFoundError:
        is_missing = True
    if is_missing:
        pytest.skip(
            f"{NEEDED[name]} is not installed here; run bash scripts/hosts_environment.sh, "
            "then .venv-hosts/bin/pytest -m hosts tests/hosts"
        )
    with Host(name, tmp_path_factory.mktemp(name)) as started:
        yield started


def assert_equal(run: Run, stock: Run, tolerance: float = 1e-6) -> None:
    """Losses, norms of gradients, evaluations and exported experts are those of a stock run, up to rounding."""
    assert not any((*run.codes, *stock.codes)), run.log[-3000:]
    worst = {}
    for name in ("loss", "gradient_norm", "evaluation", "experts"):
        got, wanted = (dict(_numbers(one.values(name))) for one in (run, stock))
        assert got.keys() == wanted.keys()
        worst[name] = max((abs(got[key] / wanted[key] - 1) for key in wanted), default=0.0)
    print(worst)  # pytest -rP shows it
    assert len(run.values("loss")) == len(run.values("gradient_norm")) > 0 and run.values("experts")
    assert max(worst.values()) <= tolerance, worst


def _numbers(values: list[Any]) -> Iterator[tuple[str, float]]:
    for index, value in enumerate(values):
        parts = value.items() if isinstance(value, dict) else [("", value)]
        yield from ((f"{index} {name}", float(number)) for name, number in parts)


def assert_balanced(run: Run, steps: int = 8) -> None:
    """The strategy had the loads of all iterations in all layers, and said where it is."""
    assert run.values("iterations") == [steps]
    assert all(known == steps for seen in run.values("seen") for known in seen.values())
    assert "[fssdp] strategy" in run.log
    assert f"at the end, iteration {steps}" in run.log
