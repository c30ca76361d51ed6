import pytest
import torch

from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout


def test_tensors_that_do_not_fit_one_chunk_are_refused():
    with pytest.raises(ValueError, match="wanted one"):
        ExpertLayout.of([torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)])
