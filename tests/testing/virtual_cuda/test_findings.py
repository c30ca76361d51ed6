"""The detector finds each kind of defect, and stays silent where a GPU has no problem either."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.virtual_cuda import FindingKind, VirtualDevice, virtual_cuda


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    with virtual_cuda() as books:
        yield books


def kinds(device: VirtualDevice) -> list[FindingKind]:
    return [finding.kind for finding in device.findings]


def test_a_read_without_a_wait_is_a_race_with_both_places(device: VirtualDevice) -> None:
    x = torch.zeros(4, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)
    (finding,) = device.findings
    assert finding.kind is FindingKind.RACE
    assert finding.place.startswith("tests/testing/virtual_cuda/test_findings.py:")
    assert finding.other_place == finding.memory_place
    assert "zeros" in finding.other
    assert "add_" in finding.what


def test_a_wait_removes_the_race(device: VirtualDevice) -> None:
    x = torch.zeros(4, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    x.mul_(2)
    assert x.tolist() == [2.0] * 4
    assert not device.findings


def test_an_event_that_was_recorded_too_early_does_not_order(device: VirtualDevice) -> None:
    x = torch.zeros(4, device="cuda")
    side = torch.cuda.Stream()
    event = torch.cuda.current_stream().record_event()
    x.add_(1)
    side.wait_event(event)
    with torch.cuda.stream(side):
        x.sum()
    assert kinds(device) == [FindingKind.RACE]


def test_a_host_synchronization_orders_later_work_on_all_streams(device: VirtualDevice) -> None:
    x = torch.zeros(4, device="cuda")
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)
    assert not device.findings


def test_disjoint_views_of_one_chunk_do_not_conflict(device: VirtualDevice) -> None:
    chunk = torch.empty(8, device="cuda")
    side = torch.cuda.Stream()
    chunk[:4].zero_()
    with torch.cuda.stream(side):
        chunk[4:].zero_()
    assert not device.findings
    with torch.cuda.stream(side):
        chunk[3:5].zero_()
    assert kinds(device) == [FindingKind.RACE]


def use_on_side_stream(x: Tensor, side: torch.cuda.Stream) -> None:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()


def test_memory_that_another_stream_uses_must_not_be_given_back(device: VirtualDevice) -> None:
    x = torch.zeros(4, device="cuda")
    use_on_side_stream(x, torch.cuda.Stream())
    del x
    assert kinds(device) == [FindingKind.FREED_IN_USE]


@pytest.mark.parametrize("how", ["record_stream", "wait"])
def test_record_stream_or_a_wait_makes_giving_back_safe(device: VirtualDevice, how: str) -> None:
    x = torch.zeros(4, device="cuda")
    side = torch.cuda.Stream()
    use_on_side_stream(x, side)
    if how == "wait":
        torch.cuda.current_stream().wait_stream(side)
    else:
        x.record_stream(side)
    del x
    assert not device.findings


def test_released_storages_are_given_back_and_must_not_be_used(device: VirtualDevice) -> None:
    x = torch.zeros(4, device="cuda")
    x.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == 0
    x.untyped_storage().resize_(16)
    x.zero_()
    assert not device.findings
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="virtual_cuda: use of memory that was given back"):
        x.add_(1)
    assert kinds(device) == [FindingKind.USE_AFTER_FREE]


def test_cpu_tensors_among_cuda_ones_are_found(device: VirtualDevice) -> None:
    x = torch.zeros(4, device="cuda")
    x.index_select(0, torch.tensor([1]))
    assert kinds(device) == [FindingKind.DEVICE_MIX]


def test_cpu_scalars_are_no_mix(device: VirtualDevice) -> None:
    x = torch.zeros(4, device="cuda")
    x * torch.tensor(2.0) + 1
    assert not device.findings


def test_a_cpu_index_makes_the_host_wait(device: VirtualDevice) -> None:
    x = torch.zeros(4, device="cuda")
    x[torch.tensor([1])]
    assert not device.findings
    assert [event.what for event in device.host_syncs] == ["index"]


def test_host_synchronizations_have_their_places(device: VirtualDevice) -> None:
    x = torch.ones(4, device="cuda")
    assert x.sum().item() == 4
    assert x.cpu().device.type == "cpu"
    assert x.nonzero().shape == (4, 1)
    x[x > 0] = 2
    x.to("cuda:0").cuda()
    device.mark("end")
    assert [event.what for event in device.host_syncs] == [
        "_local_scalar_dense",
        "copy to the host",
        "nonzero",
    ]
    assert all("test_findings.py:" in event.place for event in device.host_syncs)
    assert device.counts["mark"] == 1


def test_copies_of_pinned_memory_do_not_stop_the_host(device: VirtualDevice) -> None:
    source = torch.ones(4).pin_memory()
    x = source.to("cuda", non_blocking=True)
    target = torch.empty(4, pin_memory=True)
    target.copy_(x, non_blocking=True)
    assert not device.host_syncs
    torch.cuda.current_stream().record_event().synchronize()
    assert target.tolist() == [1.0] * 4
    assert not device.findings


def test_the_host_must_wait_before_it_reads_pinned_memory(device: VirtualDevice) -> None:
    target = torch.ones(4, device="cuda").to("cpu", non_blocking=True)
    assert target.is_pinned()
    assert target.tolist() == [1.0] * 4
    assert kinds(device) == [FindingKind.RACE]


def test_a_copy_to_pageable_memory_stops_the_host_all_the_same(device: VirtualDevice) -> None:
    torch.empty(4).copy_(torch.ones(4, device="cuda"), non_blocking=True)
    assert len(device.host_syncs) == 1


def test_empty_products_launch_nothing(device: VirtualDevice) -> None:
    x, w = torch.empty(0, 3, device="cuda"), torch.zeros(3, 2, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x @ w
    assert not device.findings


def test_factories_read_nothing(device: VirtualDevice) -> None:
    x = torch.ones(3, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        y = torch.zeros_like(x)
        x.new_zeros(3)
    assert y.is_cuda
    assert y.device == torch.device("cuda", 0)
    assert not device.findings


def test_autograd_runs_on_the_device(device: VirtualDevice) -> None:
    host = torch.randn(3, requires_grad=True)
    x = host.cuda()
    made = torch.randn(3, device="cuda", requires_grad=True)
    (x * made.exp()).sum().backward()
    assert host.grad is not None
    assert not host.grad.is_cuda
    assert made.grad is not None
    assert made.grad.is_cuda
    assert not device.findings


def test_modules_and_optimizers_work(device: VirtualDevice) -> None:
    model = torch.nn.Linear(3, 2).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 3, device="cuda")).sum().backward()
    optimizer.step()
    assert all(parameter.is_cuda for parameter in model.parameters())
    assert not device.findings


def test_everything_is_restored_at_the_end() -> None:
    before = (torch.cuda.Stream, torch.cuda.is_available(), torch.Tensor.device)
    with virtual_cuda() as device:
        assert torch.cuda.is_available()
        x = torch.ones(3, device="cuda")
    assert before == (torch.cuda.Stream, torch.cuda.is_available(), torch.Tensor.device)
    assert not x.is_cuda
    assert not device.findings


def test_tensors_that_torch_makes_for_itself_are_on_the_device_of_their_users(device: VirtualDevice) -> None:
    x = torch.arange(6.0, device="cuda", requires_grad=True)
    first, _, last = torch.split(x, [2, 0, 4])
    (first.sum() + 2 * last.sum()).backward()  # the formula of split makes zeros for the part without use
    assert torch.nn.functional.one_hot(x.detach().long(), 8).is_cuda
    assert not device.findings
    x + torch.zeros(6)
    assert kinds(device) == [FindingKind.DEVICE_MIX]


def test_a_module_moves_with_its_data_types() -> None:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("numbers", torch.arange(3))
    with virtual_cuda() as device:
        module.to(torch.device("cuda"))
        assert module.weight.is_cuda
        assert module.weight.dtype is torch.float32
        assert module.numbers.dtype is torch.int64
        module.to("cuda", torch.bfloat16)
        assert (module.weight.dtype, module.numbers.dtype) == (torch.bfloat16, torch.int64)
    device.assert_clean()
