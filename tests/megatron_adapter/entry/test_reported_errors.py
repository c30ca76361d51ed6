"""Which rank prints an error that all ranks have."""

import os
import re

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.entry import bad_input
from megatron_fssdp.megatron_adapter.entry.bad_input import report
from tests.support.python_process import run_python


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


_OLD = "import megatron.core.transformer.multi_token_prediction as old; del old.MultiTokenPredictionLayer"
_LAUNCH = "from megatron_fssdp.megatron_adapter.entry.launcher import launch; launch(['pretrain_gpt'])"


@pytest.mark.parametrize(
    ("installed", "way", "got"),
    [
        (_OLD, _LAUNCH, "megatron-core .* without .*MultiTokenPredictionLayer"),
        (_OLD, "import megatron_fssdp; megatron_fssdp.attach('ep')", "megatron-core .*MultiTokenPrediction"),
        ("import sys; sys.modules['megatron'] = None", _LAUNCH, "no megatron-core"),
    ],
)
def test_one_line_names_what_a_megatron_lacks_that_modules_import(installed, way, got):
    run = run_python("-c", f"{installed}; {way}")
    assert re.search(f"rror: Megatron: got {got}", run.stderr.splitlines()[-1])
