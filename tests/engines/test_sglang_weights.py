"""SGLang's calls for weights against a stand-in, which joins groups and receives as SGLang's workers do.

Read, not run: the calls of SGLang itself (snapshot of August 2026, `model_runner_components/weight_updater.py`).
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from moe_replay.engines.sglang import weights as sglang_weights
from moe_replay.engines.sglang.client import SglangClient
from moe_replay.engines.sglang.weights import WeightCalls
from moe_replay.errors import EngineError, MissingExtraError
from moe_replay.records import SamplingParams
from moe_replay.routes.topology import MoeLayer, MoeTopology
from moe_replay.weights.identity import Probe
from tests.engines.serving import serving

pytest.importorskip("starlette", reason="the stand-in for the server needs starlette, which comes with vLLM")

TOPOLOGY = MoeTopology(3, (MoeLayer(1, 8, 2), MoeLayer(2, 8, 2)))
PROBE = Probe(token_ids=[1, 2, 3], logprobs=np.full(2, -2.0, np.float32), tolerance=1e-3)
WEIGHTS = {
    "embed": torch.arange(600.0).reshape(20, 30),
    "gate": torch.randn(8, 4),  # float32, as a router
    "experts": torch.randn(8, 40).bfloat16(),
    "bias": torch.arange(8),
}
INIT, BROADCAST, DESTROY = (
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/destroy_weights_update_group",
)
TENSOR, STAMP = "/update_weights_from_tensor", "/update_weight_version"


class Sglang:
    """A server with one worker: what it was asked, and the weights that it has loaded."""

    def __init__(self, **settings: Any) -> None:
        self.settings = {"version": "0.5.23", "model_path": "nowhere", "tp_size": 1} | settings
        self.asked: list[tuple[str, Any]] = []
        self.loaded: dict[str, Tensor] = {}
        self.groups: dict[str, Any] = {}
        self.version = "default"
        self.paused = False
        self.refused: str | None = None

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked if path not in ("/server_info", "/model_info")]

    def answer(self, path: str, content: Any) -> Any:
        self.asked.append((path, content))
        if path == self.refused:
            return None
        if path == "/server_info":
            return self.settings
        if path == "/model_info":
            return {"weight_version": self.version}
        if path == "/generate":
            scored = [[None if i == 0 else -2.0, token, None] for i, token in enumerate(content["input_ids"])]
            return {"meta_info": {"input_token_logprobs": scored}}
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
        if path in (INIT, BROADCAST, TENSOR, STAMP):
            assert self.paused
        self.version = content.get("weight_version") or content.get("new_version") or self.version
        if path == INIT:
            self.join(**content)
        elif path == BROADCAST:
            self.receive(**content)
        elif path == DESTROY:
            dist.destroy_process_group(self.groups.pop(content["group_name"]))
        elif path == TENSOR:
            handles = [json.loads(base64.b64decode(text)) for text in content["serialized_named_tensors"]]
            assert len(handles) == self.settings["tp_size"]
            self.loaded |= {name: torch.tensor(values) for name, values in handles[0]}
        return {"success": True, "message": "Succeeded"}

    def join(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Make a group as SGLang's `init_custom_process_group` does."""
        address, limit = f"tcp://{master_address}:{master_port}", timedelta(seconds=60)
        store, rank, size = next(c10d.rendezvous(address, rank_offset, world_size, timeout=limit))
        store = dist.PrefixStore(group_name, store)
        group, _ = c10d._new_process_group_helper(
            size, rank, [], dist.Backend(backend), store, group_name=group_name, timeout=limit
        )
        c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
        self.groups[group_name] = group

    def receive(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str, **others: Any
    ) -> None:
        assert others.keys() == {"flush_cache", "weight_version"}
        options = dist.BroadcastOptions()
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            self.loaded[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            self.groups[group_name].broadcast([self.loaded[name]], options).wait()

    @contextmanager
    def client(self, kind: str) -> Iterator[SglangClient]:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        async def handle(request: Any) -> Any:
            content = json.loads(await request.body() or b"null")
            answer = await asyncio.to_thread(self.answer, request.url.path, content or {})
            return JSONResponse(answer or {"success": False, "message": "no"}, 200 if answer else 400)

        app = Starlette(routes=[Route("/{path:path}", handle, methods=["GET", "POST"])])
        with serving(app) as url, SglangClient(url, topology=TOPOLOGY, weights=kind, timeout=60) as client:  # type: ignore[arg-type]
            yield client


def same(found: dict[str, Tensor]) -> bool:
    return found.keys() == WEIGHTS.keys() and all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in WEIGHTS.items()
    )


def test_a_broadcast_brings_every_tensor_in_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_weights, "CHUNK_BYTES", 2500)
    server = Sglang()
    with server.client("distributed") as client:
        client.update_weights(iter(WEIGHTS.items()), 4, PROBE, "a")
        assert same(server.loaded)
        assert server.version == "4@a"
        first, last = ["/pause_generation", INIT], [STAMP, "/flush_cache", "/continue_generation", "/generate"]
        assert server.paths == [*first, BROADCAST, BROADCAST, *last]
        stamps = {content["weight_version"] for path, content in server.asked if path == BROADCAST}
        assert stamps == {"4@incomplete"}
        server.asked.clear()
        server.loaded = {}
        client.update_weights(iter(WEIGHTS.items()), 5, PROBE, "b")
        assert same(server.loaded)
        assert server.paths == [first[0], BROADCAST, BROADCAST, *last], "the group is kept"
        server.version = "default"  # it has restarted
        client.update_weights(iter(WEIGHTS.items()), 6, PROBE, "c")
        assert server.paths.count(INIT) == 1
        assert server.version == "6@c"
    assert not server.groups, "the client has left"


def test_after_a_refusal_nothing_is_sampled_and_the_next_update_makes_a_new_group() -> None:
    server = Sglang()
    with server.client("distributed") as client:
        server.refused = BROADCAST
        with pytest.raises(EngineError, match=f"refused {BROADCAST}"):
            client.update_weights(iter(WEIGHTS.items()), 4, PROBE, "a")
        assert not server.paused
        assert not server.groups
        with pytest.raises(EngineError, match="did not succeed"):
            client.generate([[1, 2]], SamplingParams())
        server.refused = None
        client.update_weights(iter(WEIGHTS.items()), 5, PROBE, "b")
        assert same(server.loaded)
        assert server.version == "5@b"
        assert len(server.groups) == 1


def test_a_group_that_the_server_refuses() -> None:
    def refuse(path: str, content: Any) -> None:
        raise EngineError(f"no {path}")

    calls = WeightCalls("distributed", {}, "http://127.0.0.1:1", refuse, 1.0)
    with pytest.raises(EngineError, match=f"no {INIT}"):
        calls.send(WEIGHTS.items(), "1@incomplete")


class Serializer:
    """SGLang's, with values in place of handles."""

    @staticmethod
    def serialize(chunk: list[tuple[str, Tensor]], output_str: bool) -> str:
        assert output_str
        return base64.b64encode(json.dumps([(name, tensor.tolist()) for name, tensor in chunk]).encode()).decode()


def test_handles_of_memory_go_to_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_weights, "_check", lambda *_: None)  # there is no GPU
    utils: Any = type(sys)("sglang.srt.utils")
    utils.MultiprocessingSerializer = Serializer
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    server = Sglang(tp_size=2)
    with server.client("tensor") as client:
        client.update_weights(iter(WEIGHTS.items()), 4, PROBE, "a")
    assert server.loaded.keys() == WEIGHTS.keys()
    assert torch.equal(server.loaded["embed"], WEIGHTS["embed"])
    assert server.paths.count(TENSOR) == 1
    assert server.version == "4@a"


def test_the_tensor_call_needs_sglang_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_weights, "_check", lambda *_: None)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", None)
    calls = WeightCalls("tensor", {}, "http://a:1", lambda path, content: None, 60)
    with pytest.raises(MissingExtraError, match="SGLang in the trainer's environment"):
        calls.send(WEIGHTS.items(), "1@incomplete")


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        ("pigeon", {}, "unknown weight transport"),
        ("distributed", {"pp_size": 2}, "--pp-size 2"),
        ("distributed", {"dp_size": 2}, "--dp-size 2"),
        ("distributed", {"quantization": "fp8"}, r"--quantization fp8.*weights = folder"),
        ("tensor", {}, "no GPU here"),
    ],
)
def test_servers_that_cannot_take_weights_this_way(
    kind: str, settings: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_weights, "_device", lambda: torch.device("cpu"))
    with pytest.raises(EngineError, match=text):
        WeightCalls(kind, settings, "http://a:1", lambda path, content: None, 60)
    WeightCalls("distributed", {"dp_size": 2, "enable_dp_attention": True}, "http://a:1", lambda *_: None, 60)


@pytest.mark.parametrize("kind", ["tensor", "distributed"])
def test_an_npu_sends_its_weights_by_a_folder(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_weights, "accelerator", lambda: "npu")
    with pytest.raises(EngineError, match=rf"cannot take weights by {kind}.*weights = folder"):
        WeightCalls(kind, {}, "http://a:1", lambda path, content: None, 60)
