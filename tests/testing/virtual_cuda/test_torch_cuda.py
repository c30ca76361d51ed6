"""What ``torch.cuda`` answers on a virtual device."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.virtual_cuda import EventKind, VirtualDevice, virtual_cuda


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    with virtual_cuda(capability=(8, 6), num_devices=2, total_memory=1 << 20) as books:
        yield books


def test_properties_of_the_device(device: VirtualDevice) -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.is_initialized()
    assert torch.cuda.device_count() == 2
    assert torch.cuda.get_device_capability() == (8, 6)
    assert torch.cuda.get_device_properties(0).major == 8
    torch.cuda.set_device("cuda:1")
    assert torch.cuda.current_device() == 1
    assert torch.empty(1, device="cuda").device == torch.device("cuda", 1)
    with torch.cuda.device(0):
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 1


def test_grouped_products_stop_the_host_without_their_kernel(device: VirtualDevice) -> None:
    rows = torch.randn(8, 16, dtype=torch.bfloat16, device="cuda")
    weights = torch.randn(2, 16, 8, dtype=torch.bfloat16, device="cuda")
    offsets = torch.tensor([4, 8], dtype=torch.int32).to("cuda", non_blocking=True)
    torch.nn.functional.grouped_mm(rows, weights, offs=offsets)
    assert len(device.host_syncs) == 1


def test_memory_is_counted(device: VirtualDevice) -> None:
    x = torch.empty(1000, device="cuda")
    assert torch.cuda.memory_allocated() == torch.cuda.memory_stats()["allocated_bytes.all.current"] == 4096
    del x
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.max_memory_allocated() == 4096
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    assert torch.cuda.mem_get_info() == (1 << 20, 1 << 20)


def test_random_states_are_those_of_the_cpu(device: VirtualDevice) -> None:
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.randn(3, device="cuda").tolist()
    torch.cuda.set_rng_state(state)
    assert torch.randn(3, device="cuda").tolist() == first
    torch.manual_seed(3)
    assert torch.randn(3).tolist() == first


def test_streams_are_current_in_their_context_only(device: VirtualDevice) -> None:
    default, side = torch.cuda.current_stream(), torch.cuda.Stream(priority=-1)
    assert default == torch.cuda.default_stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() == side
    assert torch.cuda.current_stream() == default
    torch.cuda.set_stream(side)
    assert torch.cuda.current_stream() == side
    assert isinstance(side, torch.cuda.Stream)
    assert device.counts[EventKind.STREAM_MADE] == 1


def test_events_measure_made_up_times_that_do_not_change(device: VirtualDevice) -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.zeros(3, device="cuda").add_(1)
    end.record()
    for _ in range(2):
        end.synchronize()
        assert begin.elapsed_time(end) == pytest.approx(0.02)
    assert [event.what for event in device.host_syncs] == ["event.synchronize"], "the second wait is over"


def test_tensors_say_that_they_are_on_the_device(device: VirtualDevice) -> None:
    x = torch.ones(2, device="cuda")
    views = (x, x[1:], x.view(2, 1), x.double(), x + 1, x.new_zeros(3), torch.zeros_like(x), x.detach())
    assert all(view.is_cuda and not view.is_cpu and view.device.type == "cuda" for view in views)
    assert x.type() == "torch.cuda.FloatTensor"
    assert isinstance(torch.cuda.FloatTensor([1.0]), torch.cuda.FloatTensor)
    assert x.get_device() == 0
    assert repr(x).endswith("on cuda:0")
    with torch.device("cuda"):
        assert torch.arange(3).is_cuda
    assert not torch.empty_like(x, device="cpu").is_cuda
    assert x.to(torch.ones(1)).device.type == "cpu"
    with pytest.raises(TypeError, match="convert cuda"):
        x.numpy()
    with pytest.raises(NotImplementedError, match="ExternalStream"):
        torch.cuda.ExternalStream(0)


def test_a_device_cannot_be_nested_and_streams_outlive_it() -> None:
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
    assert "the stream made at [tests/testing/virtual_cuda/test_torch_cuda.py" in later.findings[0].what
