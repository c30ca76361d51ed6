import pytest
import torch

from devtools.virtual_cuda import virtual_cuda


def test_a_device_answers_as_torch_does():
    with virtual_cuda(capability=(8, 6), num_devices=2, total_memory=1 << 20):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 2
        assert torch.cuda.get_device_capability() == (8, 6)
        with torch.cuda.device(1):
            x = torch.empty(1000, device="cuda")
            assert x.device == torch.device("cuda", 1)
        assert torch.cuda.memory_allocated() == 4096
        del x
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (0, 4096)
        torch.cuda.manual_seed(3)
        first = torch.randn(3, device="cuda").tolist()
        torch.manual_seed(3)
        assert torch.randn(3).tolist() == first


def test_grouped_products_stop_the_host_without_their_kernel():
    with virtual_cuda(capability=(8, 6)) as device:
        rows = torch.randn(8, 16, dtype=torch.bfloat16, device="cuda")
        weights = torch.randn(2, 16, 8, dtype=torch.bfloat16, device="cuda")
        offsets = torch.tensor([4, 8], dtype=torch.int32).to("cuda", non_blocking=True)
        torch.nn.functional.grouped_mm(rows, weights, offs=offsets)
    assert len(device.host_syncs) == 1


def test_tensors_say_that_they_are_on_the_device():
    with virtual_cuda():
        x = torch.ones(2, device="cuda")
        views = (x, x[1:], x.view(2, 1), x.double(), x + 1, x.new_zeros(3), torch.zeros_like(x), x.detach())
        assert all(view.is_cuda and not view.is_cpu and view.device.type == "cuda" for view in views)
        assert isinstance(torch.cuda.FloatTensor([1.0]), torch.cuda.FloatTensor)
        assert not torch.empty_like(x, device="cpu").is_cuda
        with pytest.raises(TypeError, match="convert cuda"):
            x.numpy()


def test_a_device_cannot_be_nested_and_streams_outlive_it():
    with virtual_cuda() as device, pytest.raises(RuntimeError, match="there is a virtual device already"):
        device.__enter__()
    with virtual_cuda():
        kept = torch.cuda.Stream()
    with pytest.raises(RuntimeError, match="outside of"):
        kept.synchronize()
    with virtual_cuda() as later:
        x = torch.zeros(3, device="cuda")
        with torch.cuda.stream(kept):
            x.add_(1)
    assert len(later.findings) == 1
