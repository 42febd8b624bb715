"""Memory moved to the host: tensors and their views are empty meanwhile, and what they were afterwards."""

from __future__ import annotations

import pytest
import torch

from moe_replay.train.backends.offload import HostMemory

CPU = torch.device("cpu")


def bytes_away(memory: HostMemory) -> int:
    return sum(block.size for block in memory._blocks.values())


def test_memory_goes_and_comes_back_under_the_same_tensors() -> None:
    whole = torch.randn(7, 5)
    view, other, empty = whole[2:4, 1:], torch.arange(10, dtype=torch.int16), torch.empty(0)
    before = [tensor.clone() for tensor in (whole, view, other)]
    memory = HostMemory(CPU)
    for _ in range(2):  # the second time in the same host memory
        memory.take([view, whole, other, empty])
        assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
        assert bytes_away(memory) == 7 * 5 * 4 + 10 * 2, "what is shared counts once"
        for tensor, wanted in zip((whole, view, other), before, strict=True):
            content = memory.content_of(tensor)
            assert content is not None
            assert torch.equal(content, wanted)
        memory.give_back()
        assert bytes_away(memory) == 0
        assert all(map(torch.equal, (whole, view, other), before))
        assert memory.content_of(whole) is None
        whole.add_(1)
        before = [tensor.clone() for tensor in (whole, view, other)]


def test_more_tensors_can_follow_the_first_ones() -> None:
    first, second = torch.randn(1000), torch.randn(3000)
    wanted = [first.clone(), second.clone()]
    memory = HostMemory(CPU)
    memory.take([first])
    memory.take([first, second])
    assert bytes_away(memory) == 16_000
    memory.give_back()
    assert all(map(torch.equal, (first, second), wanted))


def test_without_content_tensors_come_back_as_zeros() -> None:
    gradients = torch.randn(100)
    memory = HostMemory(CPU, discard=True)
    memory.take([gradients])
    assert gradients.untyped_storage().nbytes() == 0
    assert memory.content_of(gradients) is None
    memory.give_back()
    assert torch.equal(gradients, torch.zeros(100))


def test_tensors_of_another_device_stay() -> None:
    on_cpu = torch.ones(3)
    memory = HostMemory(torch.device("meta"))
    memory.take([on_cpu])
    assert bytes_away(memory) == 0
    assert torch.equal(on_cpu, torch.ones(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_a_gpu_is_free_for_others() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tensor = torch.randn(64 * 2**20, device=device)
    wanted = tensor.cpu()
    before = torch.cuda.memory_reserved()
    memory = HostMemory(device)
    memory.take([tensor])
    assert torch.cuda.memory_reserved() <= before - tensor.numel() * 4
    assert memory.content_of(tensor[:1]).is_pinned()  # type: ignore[union-attr]
    memory.give_back()
    assert torch.equal(tensor.cpu(), wanted)
