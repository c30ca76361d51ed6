"""Which rank prints an error that all ranks have."""

import os

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.entry import bad_input
from megatron_fssdp.megatron_adapter.entry.bad_input import report


@pytest.mark.parametrize(
    ("rank", "local", "place"),
    [("0", "0", ""), ("8", "0", " on node1"), ("3", "3", " on rank 3"), ("9", "1", " on rank 9")],
)
def test_the_first_rank_of_a_node_is_the_first_to_print_an_error(rank, local, place, monkeypatch, capsys):
    """torchrun ends a node's ranks when one ends. An error that the first one does not have is not lost."""
    waited = []
    monkeypatch.setattr(os, "environ", {"RANK": rank, "LOCAL_RANK": local})
    monkeypatch.setattr(bad_input.time, "sleep", waited.append)
    monkeypatch.setattr(bad_input.socket, "gethostname", lambda: "node1")
    report(ConfigurationError("slots: got -1"))
    assert waited == [60.0] * (local != "0")
    assert capsys.readouterr().err == f"[fssdp] error{place}: slots: got -1\n"
