import pytest
import torch

from devtools.virtual_cuda import FindingKind, virtual_cuda


@pytest.fixture
def device():
    with virtual_cuda() as books:
        yield books


def kinds(device):
    return [finding.kind for finding in device.findings]


def test_a_read_without_a_wait_is_a_race_with_both_places(device):
    x = torch.zeros(4, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)
    (finding,) = device.findings
    assert finding.kind is FindingKind.RACE
    assert finding.place.startswith("tests/testing/virtual_cuda/test_findings.py:")
    assert finding.other_place == finding.memory_place
    assert "zeros" in finding.other_use
    assert "add_" in finding.use


def wait_for_a_chain(x, side):
    between = torch.cuda.Stream()
    between.wait_stream(torch.cuda.current_stream())
    side.wait_stream(between)


def wait_for_an_early_event(x, side):
    event = torch.cuda.current_stream().record_event()
    x.add_(1)
    side.wait_event(event)


WAITS = {
    "stream": lambda x, side: side.wait_stream(torch.cuda.current_stream()),
    "event": lambda x, side: side.wait_event(torch.cuda.current_stream().record_event()),
    "chain": wait_for_a_chain,
    "host": lambda x, side: torch.cuda.current_stream().synchronize(),
    "early event": wait_for_an_early_event,
}


@pytest.mark.parametrize("how", WAITS)
def test_a_wait_orders_what_was_issued_before(device, how):
    x, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    WAITS[how](x, side)
    with torch.cuda.stream(side):
        x.sum()
    assert (not device.findings) == (how != "early event")


def test_disjoint_views_of_one_chunk_do_not_conflict(device):
    chunk, side = torch.empty(8, device="cuda"), torch.cuda.Stream()
    chunk[:4].zero_()
    with torch.cuda.stream(side):
        chunk[4:].zero_()
    assert not device.findings
    with torch.cuda.stream(side):
        chunk[3:5].zero_()
    assert kinds(device) == [FindingKind.RACE]


@pytest.mark.parametrize("how", ["nothing", "record_stream", "wait"])
def test_memory_that_another_stream_uses_must_not_be_given_back(device, how):
    x, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    if how == "wait":
        torch.cuda.current_stream().wait_stream(side)
    elif how == "record_stream":
        x.record_stream(side)
    del x
    assert kinds(device) == ([FindingKind.FREED_IN_USE] if how == "nothing" else [])


def test_released_storages_are_given_back_and_must_not_be_used(device):
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


def test_cpu_tensors_among_cuda_ones_are_found_but_for_numbers_and_indices(device):
    x = torch.zeros(4, device="cuda")
    x * torch.tensor(2.0) + 1
    x[torch.tensor([1])]
    assert not device.findings
    assert [event.name for event in device.host_syncs] == ["index"]
    x.index_select(0, torch.tensor([1]))
    assert kinds(device) == [FindingKind.DEVICE_MIX]


def test_host_synchronizations_have_their_places(device):
    x = torch.ones(4, device="cuda")
    assert x.sum().item() == 4
    assert x.cpu().device.type == "cpu"
    assert x.nonzero().shape == (4, 1)
    x[x > 0] = 2
    x.to("cuda:0").cuda()
    torch.empty(4).copy_(x, non_blocking=True)
    device.mark("end")
    waits = ["_local_scalar_dense", "copy to the host", "nonzero", "copy to the host"]
    assert [event.name for event in device.host_syncs] == waits
    assert all("test_findings.py:" in event.place for event in device.host_syncs)
    assert device.counts["mark"] == 1


def test_copies_of_pinned_memory_do_not_stop_the_host(device):
    x = torch.ones(4).pin_memory().to("cuda", non_blocking=True)
    target = torch.empty(4, pin_memory=True)
    target.copy_(x, non_blocking=True)
    assert not device.host_syncs
    torch.cuda.current_stream().record_event().synchronize()
    assert target.tolist() == [1.0] * 4
    assert not device.findings
    unread = x.to("cpu", non_blocking=True)
    assert unread.is_pinned()
    assert unread.tolist() == [1.0] * 4
    assert kinds(device) == [FindingKind.RACE], "the host must wait before it reads page-locked memory"


def test_autograd_runs_on_the_device(device):
    host = torch.randn(3, requires_grad=True)
    made = torch.randn(3, device="cuda", requires_grad=True)
    (host.cuda() * made.exp()).sum().backward()
    assert host.grad is not None
    assert made.grad is not None
    assert (host.grad.is_cuda, made.grad.is_cuda) == (False, True)
    x = torch.arange(6.0, device="cuda", requires_grad=True)
    first, _, last = torch.split(x, [2, 0, 4])
    (first.sum() + 2 * last.sum()).backward()  # the formula of split makes zeros for the part without use
    assert torch.nn.functional.one_hot(x.detach().long(), 8).is_cuda
    assert not device.findings
    x + torch.zeros(6)
    assert kinds(device) == [FindingKind.DEVICE_MIX]


def test_everything_is_restored_at_the_end():
    before = (torch.cuda.Stream, torch.cuda.is_available(), torch.Tensor.device)
    with virtual_cuda() as device:
        assert torch.cuda.is_available()
        x = torch.ones(3, device="cuda")
    assert before == (torch.cuda.Stream, torch.cuda.is_available(), torch.Tensor.device)
    assert not x.is_cuda
    assert not device.findings
