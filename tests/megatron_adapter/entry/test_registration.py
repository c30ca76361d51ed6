"""Which errors and warnings ranks repeat."""

import os
import warnings

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.entry import bad_input
from megatron_fssdp.megatron_adapter.entry.bad_input import report
from megatron_fssdp.megatron_adapter.entry.launcher import show_warnings_once


@pytest.mark.parametrize("rank", ["0", "3"])
def test_other_ranks_do_not_repeat_the_warnings_of_libraries(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"RANK": rank})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        show_warnings_once()
        for text, category, module in (
            ("Apex is missing", UserWarning, "megatron.core.optimizer"),
            ("deprecated", FutureWarning, "torch.utils.data"),
            ("NaN", RuntimeWarning, "megatron.core.x"),
            ("of the script", UserWarning, "__main__"),
        ):
            warnings.warn_explicit(text, category, "x.py", 1, module=module)
    repeated = ["Apex is missing", "deprecated"] if rank == "0" else []
    assert [str(one.message) for one in caught] == [*repeated, "NaN", "of the script"]


@pytest.mark.parametrize(
    ("rank", "local", "place"),
    [("0", "0", ""), ("8", "0", " on node1"), ("3", "3", " on rank 3"), ("9", "1", " on rank 9")],
)
def test_the_first_rank_of_a_node_is_the_first_to_print_an_error(
    rank: str, local: str, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun ends a node's ranks when one ends. An error that the first one does not have is not lost."""
    waited: list[float] = []
    monkeypatch.setattr(os, "environ", {"RANK": rank, "LOCAL_RANK": local})
    monkeypatch.setattr(bad_input.time, "sleep", waited.append)
    monkeypatch.setattr(bad_input.socket, "gethostname", lambda: "node1")
    report(ConfigurationError("slots: got -1"))
    assert waited == [60.0] * (local != "0")
    assert capsys.readouterr().err == f"[fssdp] error{place}: slots: got -1\n"
