"""Updates with what has changed alone: the weights of a full update bit for bit, or none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_replay.errors import EngineError
from moe_replay.rollout.weights.delta import Changes, KeptWeights, apply_changes
from moe_replay.rollout.weights.source import IteratorSource
from moe_replay.rollout.weights.types import Weights
from moe_replay.train.config.weights_section import WeightsConfig
from moe_replay.train.synced_engine import SyncedEngine
from moe_replay.train.weight_sync import EngineSync
from tests.rollout.test_weight_chunks import Receiver, pool_of, same

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def changed(tensor: Tensor, at: np.ndarray) -> Tensor:
    """A copy with one bit flipped in each of these elements."""
    copy = tensor.clone()
    raw = copy.reshape(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32}[copy.element_size()])
    raw[torch.from_numpy(at)] ^= 1
    return copy


def weights(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    found = {
        str(dtype): torch.randint(-100, 100, (40, 600), generator=random).to(torch.float32).mul(0.37).to(dtype)
        for dtype in DTYPES
    }
    odd = torch.tensor([float("nan"), -0.0, 0.0, float("inf")]).bfloat16()
    return found | {"odd": odd, "experts": torch.randn(4, 8, 16, generator=random), "number": torch.tensor(1.5)}


def forms(found: Changes) -> dict[str, str]:
    return {name: change.form for name, change in found._told.items()}


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_changes_make_the_same_bits(share: float) -> None:
    old = weights()
    random = np.random.default_rng(0)
    new = {}
    for name, tensor in old.items():
        new[name] = changed(tensor, np.flatnonzero(random.random(tensor.numel()) < share))
    found = Changes(new, old)
    receiver = {name: tensor.clone() for name, tensor in old.items()}
    assert sorted(apply_changes(found.content, receiver)) == sorted(new)
    assert all(bits(receiver[name]) == bits(new[name]) for name in new)
    total = sum(tensor.nbytes for tensor in new.values())
    assert found.nbytes <= total
    if share == 0.01:
        assert found.nbytes < 0.05 * total
        assert forms(found)["torch.bfloat16"] == "elements"
    if share == 0.0:
        assert set(forms(found).values()) == {"same"}


def test_a_zero_that_changes_its_sign_is_a_change() -> None:
    old, new = {"a": torch.zeros(64)}, {"a": torch.zeros(64)}
    new["a"][5] = -0.0
    receiver = {"a": old["a"].clone()}
    list(apply_changes(Changes(new, old).content, receiver))
    assert bits(receiver["a"]) == bits(new["a"])


def test_whole_rows_travel_as_rows_and_new_tensors_whole() -> None:
    old = {"a": torch.zeros(50, 512), "b": torch.zeros(4, 4), "far": torch.zeros(1, 200_000)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a"][[3, 17]] = 1.0
    new["b"] = torch.ones(5, 4)
    new["far"][0, 150_000] = 1.0  # further than 16 bits reach
    found = Changes(new, old)
    assert forms(found) == {"a": "rows", "b": "whole", "far": "elements"}
    receiver = {name: tensor.clone() for name, tensor in old.items()}
    list(apply_changes(found.content, receiver))
    assert same(receiver, new)


def test_changes_of_other_weights_are_noticed() -> None:
    old = weights()
    new = {name: changed(tensor, np.array([0])) for name, tensor in old.items()}
    other = old | {"torch.float32": changed(old["torch.float32"], np.array([777]))}
    with pytest.raises(EngineError, match=r"torch\.float32 is not the sender's after its changes.*checksum"):
        list(apply_changes(Changes(new, old).content, {name: tensor.clone() for name, tensor in other.items()}))


@pytest.mark.parametrize("content", [b"", b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 40])
def test_unreadable_changes_are_refused(content: bytes) -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        list(apply_changes(content, {}))


def test_changes_that_leave_a_tensor_out_are_refused() -> None:
    kept = KeptWeights()
    assert len(list(kept.keep(weights().items()))) == len(weights())
    kept.weights_id = "a"
    part = {name: tensor for name, tensor in weights().items() if name != "number"}
    with pytest.raises(EngineError, match="number is missing"):
        kept.change("a", [Changes(part, weights()).content])
    assert kept.weights_id == ""
    with pytest.raises(EngineError, match="does not have"):
        kept.change("a", [])


# ---- servers --------------------------------------------------------------------------------------------------------


class Copying(Receiver):
    """Takes its weights into memory of its own, as engines do."""

    def update_weights(self, weights: Weights, version: int, probe: Any = None, weights_id: str = "") -> None:
        super().update_weights(weights, version, probe, weights_id)
        self.weights = {name: tensor.clone() for name, tensor in self.weights.items()}


def steps(count: int) -> list[dict[str, Tensor]]:
    """Weights of updates in a row, each with one element in a hundred changed."""
    made, random = (
        [{name: tensor for name, tensor in weights().items() if tensor.numel() > 100}],
        np.random.default_rng(1),
    )
    for _ in range(count - 1):
        made.append(
            {
                name: changed(tensor, np.flatnonzero(random.random(tensor.numel()) < 0.01))
                for name, tensor in made[-1].items()
            }
        )
    return made


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each request with weights."""
    from moe_replay.rollout.server import client as vllm_server

    sizes: list[int] = []
    write = vllm_server.write_update

    def counted(*args: Any) -> Iterator[bytes]:
        size = 0
        for piece in write(*args):
            size += len(piece)
            yield piece
        sizes.append(size)

    monkeypatch.setattr(vllm_server, "write_update", counted)
    return sizes


def test_servers_get_changes_and_have_what_a_full_update_gives(sent: list[int]) -> None:
    engines = [Copying(), Copying()]
    made = steps(5)
    total = sum(tensor.nbytes for tensor in made[0].values())
    with ExitStack() as stack:
        pool = pool_of(stack, engines)  # type: ignore[arg-type]
        pool.send_changes(full_every=4)
        for number, tensors in enumerate(made):
            pool.update_weights(iter(tensors.items()), number, weights_id=f"update-{number}")
            assert all(same(engine.weights, tensors) for engine in engines)
            assert [engine.weight_version for engine in engines] == [number] * 2
    sizes = [sent[2 * number] for number in range(5)]
    assert sent[1::2] == sizes
    assert all(size > total for size in (sizes[0], sizes[4])), "the first, and every fourth"
    assert all(size < 0.1 * total for size in sizes[1:4])


def test_the_bytes_of_an_update_are_those_that_travelled(sent: list[int]) -> None:
    made = steps(3)
    total = sum(tensor.nbytes for tensor in made[0].values())
    sync = EngineSync(WeightsConfig(delta=True), torch.device("cpu"))
    with ExitStack() as stack:
        pool = pool_of(stack, [Copying(), Copying()])  # type: ignore[list-item]
        pool.send_changes(full_every=100)
        engine = SyncedEngine(pool)
        reports = [sync.send(IteratorSource(one.items), engine, number, None) for number, one in enumerate(made)]
    assert reports[0].nbytes == total
    assert all(0 < report.nbytes < 0.1 * total for report in reports[1:])
    assert all(report.nbytes < size for report, size in zip(reports, sent[::2], strict=True)), "without their frames"
    assert reports[1].metrics()["weights/gb"] == reports[1].nbytes / 1e9


def test_without_delta_no_copy_is_kept(sent: list[int]) -> None:
    with ExitStack() as stack:
        pool = pool_of(stack, [Copying()])  # type: ignore[list-item]
        for number, tensors in enumerate(steps(2)):
            pool.update_weights(iter(tensors.items()), number, weights_id=f"update-{number}")
        assert pool._members[0].engine._info().kept_id == ""
    assert sent[0] == sent[1]


def test_a_server_that_lost_its_copy_is_sent_everything(sent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[KeptWeights] = []
    create = KeptWeights.__init__
    monkeypatch.setattr(KeptWeights, "__init__", lambda self: (create(self), copies.append(self))[0])
    engines, made = [Copying(), Copying()], steps(4)
    with ExitStack() as stack:
        pool = pool_of(stack, engines)  # type: ignore[arg-type]
        pool.send_changes(full_every=100)
        pool.update_weights(iter(made[0].items()), 0, weights_id="a")
        copies[1].drop()  # as after a restart
        pool.update_weights(iter(made[1].items()), 1, weights_id="b")
        assert all(same(engine.weights, made[1]) for engine in engines)
        assert max(sent[2:4]) > 10 * min(sent[2:4])

        next(iter(copies[0]._tensors.values())).view(-1)[0] = 99  # a bit of memory went bad
        before = engines[0].updates
        pool.update_weights(iter(made[2].items()), 2, weights_id="c")
        assert engines[0].updates == before, "verified before the engine is touched"
        assert "is not the sender's after its changes" in pool._members[0].cause
        assert pool._members[0].is_quarantined
        assert same(engines[1].weights, made[2])
        pool.update_weights(iter(made[3].items()), 3, weights_id="d")
    assert all(same(engine.weights, made[3]) for engine in engines)


def test_an_update_that_broke_off_is_followed_by_all_weights(sent: list[int]) -> None:
    engine, made = Copying(), steps(3)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield next(iter(made[1].items()))
        raise EngineError("a rank is gone")

    with ExitStack() as stack:
        pool = pool_of(stack, [engine])  # type: ignore[list-item]
        pool.send_changes(full_every=100)
        pool.update_weights(iter(made[0].items()), 0, weights_id="a")
        with pytest.raises(EngineError):
            pool.update_weights(broken(), 1, weights_id="b")
        pool.update_weights(iter(made[2].items()), 2, weights_id="c")
        assert same(engine.weights, made[2])
    assert sent[-1] == sent[0]
