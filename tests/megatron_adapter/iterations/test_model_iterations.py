from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.iterations import model_iterations
from tests.support.training_preload import on_ranks


@on_ranks(2)
def test_records_that_rank_0_cannot_write_are_refused_on_all_ranks():
    model = SimpleNamespace(session=object(), name="fssdp", host=None, driver=None, chunks=[])
    describe = mock.Mock(side_effect=ConfigurationError("record_dir: got a file"))
    fakes = mock.patch.multiple(model_iterations, describe_run=describe, RunRecorder=mock.DEFAULT)
    with fakes, pytest.raises(ConfigurationError, match=r"^record_dir: got a file$"):
        model_iterations.ModelIterations._begin_records(model, Path("records"))
    assert describe.called == (dist.get_rank() == 0)
