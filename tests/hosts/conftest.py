"""One process for each host, which runs its script on forked ranks, and comparisons with stock runs."""

from importlib.util import find_spec

import pytest

from tests.hosts.forked_ranks import Host


@pytest.fixture(scope="module")
def host(request, tmp_path_factory):
    name, package = request.module.HOST
    if find_spec(package) is None:
        pytest.skip(
            f"{package} is not installed here: run bash scripts/hosts_environment.sh, then "
            ".venv-hosts/bin/pytest -m hosts tests/hosts"
        )
    started = Host(name, tmp_path_factory.mktemp(name))
    yield started
    started.pipe.close()


def assert_equal(run, stock, tolerance=1e-6):
    """Losses, norms of gradients, evaluations and exported experts are those of stock, up to rounding."""
    assert not any((*run.codes, *stock.codes)), run.log[-3000:]
    assert run.values("loss") and run.values("experts")  # noqa: PT018
    for name in ("loss", "gradient_norm", "evaluation", "experts"):
        got, wanted = run.values(name), stock.values(name)
        if name in ("evaluation", "experts"):
            got, wanted = ([number for row in values for number in row.values()] for values in (got, wanted))
        print(name, max((abs(a / b - 1) for a, b in zip(got, wanted, strict=True)), default=0.0))
        assert got == pytest.approx(wanted, rel=tolerance)


def assert_balanced(run, steps=8):
    """The strategy had the loads of all iterations in all layers, and said where it is."""
    assert run.values("iterations")[-1] == steps
    assert set(run.values("seen")[-1].values()) == {steps}
    assert "[fssdp] strategy" in run.log
    assert f"at the end, iteration {steps}" in run.log
