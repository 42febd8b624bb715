"""One update for several servers: read and serialised once, sent to all side by side; none waits for one that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import moe_replay as mr
from moe_replay.engines.base import Engine
from moe_replay.engines.server.client import RolloutClient
from moe_replay.errors import EngineError, EngineName
from moe_replay.weights.checkpoint import CHUNK_BYTES, chunks_of, send_chunks
from moe_replay.weights.source import Weights
from tests.engines.serving import serving

pytest.importorskip("tenacity", reason="the pool needs tenacity")
pytest.importorskip("starlette", reason="the server's own dependencies come with vLLM")

pytestmark = pytest.mark.slow

TOKEN = "open sesame"


class Receiver(Engine):
    """An engine that keeps the weights it is sent.

    fails_at   name of the tensor at which an update fails
    """

    name = EngineName("receiver", "1")
    weight_version: int
    weights_id: str
    topology = mr.MoeTopology(num_layers=1, moe_layers=(mr.routes.MoeLayer(0, 8, 2),), model_type="small")

    def __init__(self, fails_at: str = "") -> None:
        self.weight_version, self.weights_id = 0, ""
        self.fails_at = fails_at
        self.weights: dict[str, Tensor] = {}
        self.updates = 0

    def generate(self, prompts: Any, params: Any) -> Any:
        raise NotImplementedError

    def prompt_logprobs(self, token_ids: Any) -> Any:
        raise NotImplementedError

    def update_weights(self, weights: Weights, version: int, probe: Any = None, weights_id: str = "") -> None:
        self.updates += 1
        taken: dict[str, Tensor] = {}
        for name, tensor in weights:  # type: ignore[union-attr]
            if name == self.fails_at:
                raise EngineError("no such parameter in the model", found=name)
            taken[name] = tensor
        self.weights, self.weight_version, self.weights_id = taken, version, weights_id


def tensors(count: int = 12, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        f"model.layers.{number}.weight": torch.randn(96, 64, generator=random).to(torch.bfloat16)
        for number in range(count)
    }


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def pool_of(stack: ExitStack, engines: list[Receiver]) -> Any:
    from moe_replay.engines.pool import EnginePool
    from moe_replay.engines.server.app import build_app

    urls = [stack.enter_context(serving(build_app(engine, TOKEN))) for engine in engines]  # type: ignore[arg-type]
    return stack.enter_context(EnginePool([RolloutClient(url, token=TOKEN) for url in urls], any_version=True))


@pytest.fixture
def serialised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all that is serialised, in chunks of three tensors."""
    sizes: list[int] = []
    save = safetensors.torch.save

    def counted(content: dict[str, Tensor], *args: Any) -> bytes:
        sizes.append(sum(tensor.nbytes for tensor in content.values()))
        return save(content, *args)

    monkeypatch.setattr(safetensors.torch, "save", counted)
    monkeypatch.setattr(chunks_of, "__defaults__", (40_000,))
    return sizes


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_bytes_that_are_read_and_serialised_do_not_grow_with_the_servers(serialised: list[int], servers: int) -> None:
    wanted = tensors()
    reads: list[str] = []

    def read() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in wanted.items():
            reads.append(name)
            yield name, tensor

    engines = [Receiver() for _ in range(servers)]
    with ExitStack() as stack:
        pool_of(stack, engines).update_weights(read(), 3, weights_id="a")
    assert reads == list(wanted)
    assert serialised == [3 * 96 * 64 * 2] * 4
    assert all(same(engine.weights, wanted) for engine in engines)


def test_a_server_that_fails_does_not_stop_the_others(serialised: list[int]) -> None:
    wanted = tensors()
    engines = [Receiver(), Receiver(fails_at="model.layers.4.weight"), Receiver(), Receiver()]
    with ExitStack() as stack:
        pool = pool_of(stack, engines)
        pool.update_weights(iter(wanted.items()), 3, weights_id="a")
        assert [member.is_quarantined for member in pool._members] == [False, True, False, False]
        assert "model.layers.4.weight" in pool._members[1].cause
        assert engines[1].weights == {}
        assert all(same(engine.weights, wanted) for engine in (engines[0], *engines[2:]))
        engines[1].fails_at = ""
        pool.update_weights(iter(wanted.items()), 4, weights_id="b")
        assert not any(member.is_quarantined for member in pool._members)
    assert same(engines[1].weights, wanted)
    assert len(serialised) == 8


def test_an_update_whose_source_fails_is_not_completed(serialised: list[int]) -> None:
    """A server that does not notice missing weights would go on with some of the new ones."""

    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from tensors().items()
        raise RuntimeError("out of memory")

    engine = Receiver()
    with ExitStack() as stack:
        pool = pool_of(stack, [engine])
        with pytest.raises(RuntimeError, match="out of memory"):
            pool.update_weights(failing(), 3, weights_id="a")
    assert (engine.updates, engine.weights, engine.weights_id) == (1, {}, "")


def test_a_slow_engine_slows_the_reading(serialised: list[int]) -> None:
    started, go_on = threading.Event(), threading.Event()

    class Slow(Receiver):
        def update_weights(self, weights: Weights, version: int, probe: Any = None, weights_id: str = "") -> None:
            started.set()
            go_on.wait()
            super().update_weights(weights, version, probe, weights_id)

    read: list[str] = []

    def reading() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors().items():
            read.append(name)
            yield name, tensor

    engine = Slow()
    producer = threading.Thread(
        target=send_chunks, args=([engine], reading(), lambda engine, stream: engine.update_weights(stream, 1))
    )
    producer.start()
    started.wait()
    producer.join(timeout=0.5)
    assert len(read) <= 7, "one chunk of three waits, another is held, and its end is seen at the tensor behind it"
    go_on.set()
    producer.join()
    assert same(engine.weights, tensors())


def test_a_large_tensor_has_a_chunk_of_its_own() -> None:
    weights = {"a": torch.zeros(2), "b": torch.zeros(100), "c": torch.zeros(2), "d": torch.zeros(2)}
    chunks = list(chunks_of(weights.items(), 64))
    assert [list(chunk.tensors) for chunk in chunks] == [["a"], ["b"], ["c", "d"]]
    assert CHUNK_BYTES < 2**30
