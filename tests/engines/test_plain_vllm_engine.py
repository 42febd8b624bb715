"""Training with a plain `vllm serve`: endpoints as vLLM 0.30 and 0.32 have them, servers that cannot be used."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_replay.engines.base import StartRequest
from moe_replay.engines.registry import start_engine
from moe_replay.engines.vllm_serve.client import VllmServeClient
from moe_replay.engines.vllm_serve.weights import weight_route
from moe_replay.engines.vllm_serve.wire import WORKER_EXTENSION, ServerSettings
from moe_replay.errors import EngineError, EngineUnavailableError
from moe_replay.records import FinishReason, SamplingParams
from moe_replay.routes.topology import MoeLayer, MoeTopology
from moe_replay.weights.checkpoint import read_tensors
from moe_replay.weights.identity import Probe
from tests.engines.serving import serving
from tests.engines.tiny import tiny_model

pytest.importorskip("starlette", reason="the stand-in for the server needs starlette, which comes with vLLM")

TOPOLOGY = MoeTopology(3, (MoeLayer(1, 8, 2), MoeLayer(2, 8, 2)))
ROUTES = np.tile(np.array([[0, 0], [3, 1], [7, 2]], np.uint8), (3, 1, 1))
WEIGHTS = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
PROBE = Probe(token_ids=[5, 6, 8], logprobs=np.array([-1.0, -2.0], np.float32), tolerance=0.01)


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


class Server:
    """A stand-in for `vllm serve`: its state, and what it was asked."""

    def __init__(self) -> None:
        self.release = "0.30.0"
        self.version = "default"
        self.paused = False
        self.asked: list[str] = []
        self.loaded: dict[str, torch.Tensor] = {}
        self.scored = [-1.0, -2.0]
        self.scored_by: dict[str, list[float]] = {}  # and by a replica
        self.replicas: list[str | None] = []  # that were asked for by name
        self.choice: dict[str, Any] = {}  # changes to what it samples
        self.config: dict[str, Any] = {
            "model_config": {
                "enable_return_routed_experts": True,
                "logprobs_mode": "processed_logprobs",
                "max_model_len": 256,
            },
            "parallel_config": {"worker_extension_cls": ""},
        }
        self.missing: set[str] = set()  # paths answered with 404
        self.disabled: set[str] = set()  # and with 403
        self.failing: set[str] = set()  # and with 500

    @contextmanager
    def client(self, **settings: Any) -> Iterator[VllmServeClient]:
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [Route("/{path:path}", self._answer, methods=["GET", "POST"])]
        with (
            serving(Starlette(routes=routes)) as url,
            VllmServeClient(url, TOPOLOGY, vocabulary=20, **settings) as engine,
        ):
            yield engine

    async def _answer(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        path = "/" + request.path_params["path"]
        body = await request.json() if await request.body() else None
        self.asked.append(path)
        self.replicas.append(request.headers.get("x-data-parallel-rank"))
        for status, paths in ((404, self.missing), (403, self.disabled), (500, self.failing)):
            if path in paths:
                return JSONResponse({"error": {"message": f"no {path}"}}, status_code=status)
        return JSONResponse(self._content(path, body))

    def _content(self, path: str, body: Any) -> Any:
        if path == "/version":
            return {"version": self.release}
        if path == "/server_info":
            return {"vllm_config": self.config}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/collective_rpc":
            assert self.paused
            return {"results": [self._in_worker(body)]}
        elif path == "/inference/v1/generate":
            assert not self.paused
            return self._generated(body)
        return {}

    def _in_worker(self, body: Any) -> str | None:
        if body["method"] == "reload_weights":
            self.loaded = dict(read_tensors(Path(body["kwargs"]["weights_path"])))
            return None
        if body["method"] == "replay_load":
            from safetensors.torch import load_file

            self.loaded |= load_file(body["args"][0])
        return "weights of 1 modules missing" if "c" in self.loaded and body["method"] == "replay_finish_update" else ""

    def _scored(self) -> list[float]:
        return self.scored_by.get(self.replicas[-1] or "", self.scored)

    def _generated(self, body: Any) -> Any:
        asked = body["sampling_params"]
        if asked.get("prompt_logprobs") is not None:
            tokens = body["token_ids"][1:]
            entries = [{str(t): {"logprob": p}} for t, p in zip(tokens, self._scored(), strict=True)]
            return {"prompt_logprobs": [None, *entries]}
        choice = {
            "index": 0,
            "token_ids": [8, 9],
            "routed_experts": npy(ROUTES),
            "logprobs": {"content": [{"logprob": -1.5}, {"logprob": -0.5}]},
            "finish_reason": "length",
        }
        if self.release == "0.32.0":
            choice["weight_versions"] = [{"version": self.version, "start": 0, "end": 2}]
        choices = [choice | {"index": index} | self.choice for index in range(asked["n"])]
        return {"choices": choices, "prompt_token_ids": body["token_ids"]}


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.mark.parametrize("release", ["0.30.0", "0.32.0"])
def test_samples_of_the_weights_that_were_sent(server: Server, release: str) -> None:
    server.release = release
    with server.client(weight_version=4) as engine:
        ((sample,),) = engine.generate([[5, 6]], SamplingParams())
        assert (sample.weight_version, sample.weights_id) == (4, "")
        engine.update_weights(WEIGHTS.items(), 7, PROBE, "run-7")
        ((first, second),) = engine.generate([[5, 6]], SamplingParams(n=2, temperature=0.7, seed=3))
    assert [(one.weight_version, one.weights_id) for one in (first, second)] == [(7, "run-7")] * 2
    assert first.trace.token_ids.tolist() == [5, 6, 8, 9]
    assert first.trace.routed_experts[:3].tolist() == [[[3, 1], [7, 2]]] * 3
    assert first.logprobs.tolist() == [-1.5, -0.5]
    assert server.version == "7@run-7"


@pytest.mark.parametrize("extension", ["", WORKER_EXTENSION])
def test_an_update_pauses_the_server_and_replaces_every_weight(server: Server, extension: str, tmp_path: Path) -> None:
    server.config["parallel_config"]["worker_extension_cls"] = extension
    with server.client(shared_folder=tmp_path) as engine:
        engine.update_weights(WEIGHTS.items(), 1, PROBE, "x")
    assert {name: tensor.tolist() for name, tensor in server.loaded.items()} == {"a": [0, 1, 2], "b": [[1, 1], [1, 1]]}
    first, *_, resumed = [server.asked.index(path) for path in ("/pause", "/collective_rpc", "/resume")]
    stamps = [number for number, path in enumerate(server.asked) if path == "/update_weight_version"]
    assert first < stamps[0] < server.asked.index("/collective_rpc") < stamps[1] < resumed
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_read_where_it_is(server: Server, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with server.client() as engine:
        engine.update_weights(tmp_path, 1)
    assert list(server.loaded) == ["a"]


@pytest.mark.parametrize("what", ["failing", "probe", "extension"])
def test_after_an_update_that_fails_nothing_is_sampled(server: Server, what: str) -> None:
    weights = WEIGHTS
    if what == "failing":
        server.failing = {"/collective_rpc"}
    elif what == "probe":
        server.scored = [-1.0, -9.0]
    else:
        server.config["parallel_config"]["worker_extension_cls"] = WORKER_EXTENSION
        weights = WEIGHTS | {"c": torch.ones(1)}
    told = {
        "failing": "no /collective_rpc",
        "probe": "does not compute with the weights",
        "extension": "weights of 1 modules missing",
    }
    with server.client() as engine:
        with pytest.raises(EngineError, match=told[what]):
            engine.update_weights(weights.items(), 1, PROBE, "x")
        assert not server.paused
        if what != "probe":
            assert server.version == "1@incomplete"
        with pytest.raises(EngineError, match="an update that did not succeed"):
            engine.generate([[5, 6]], SamplingParams())
        server.failing, server.scored, server.loaded = set(), [-1.0, -2.0], {}
        engine.update_weights(WEIGHTS.items(), 2, PROBE, "y")
        ((sample,),) = engine.generate([[5, 6]], SamplingParams())
    assert sample.weights_id == "y"


@pytest.mark.parametrize("release", ["0.30.0", "0.32.0"])
@pytest.mark.parametrize("version", ["default", "1@of another run", "1@incomplete"])
def test_a_server_of_other_weights_than_it_was_sent(server: Server, release: str, version: str) -> None:
    server.release = release
    with server.client() as engine:
        engine.update_weights(WEIGHTS.items(), 1, PROBE, "x")
        server.version = version  # it restarted, or somebody else updates it
        with pytest.raises(EngineUnavailableError, match=r"weights that it was not sent.*version 1 of update x"):
            engine.generate([[5, 6]], SamplingParams())


def test_a_completion_of_two_versions(server: Server) -> None:
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]
    server.choice = {"weight_versions": spans}
    with server.client() as engine, pytest.raises(EngineError, match="several weight versions"):
        engine.generate([[5, 6]], SamplingParams())


def test_an_aborted_request_without_routes_starts_again(server: Server) -> None:
    server.choice = {"finish_reason": "abort", "routed_experts": None, "token_ids": [8], "logprobs": None}
    with server.client() as engine:
        ((sample,),) = engine.generate([[5, 6]], SamplingParams())
    assert (sample.finish_reason, len(sample.completion_ids)) == (FinishReason.ABORT, 0)
    assert not sample.trace.valid.any()


def test_a_mask_of_the_server(server: Server) -> None:
    asked = SamplingParams(top_k=3, sampling_mask=True)
    with server.client() as engine, pytest.raises(EngineError, match="was not started to return sampling masks"):
        engine.generate([[5, 6]], asked)
    server.config["model_config"]["return_sampling_mask"] = True
    server.choice = {"sampling_mask": [[8, 2], [9]]}
    with server.client(sampling_mask=True) as engine:
        ((sample,),) = engine.generate([[5, 6]], asked)
    assert sample.sampling_mask is not None
    assert len(sample.sampling_mask) == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"missing": {"/server_info"}}, "cannot be given weights.*VLLM_SERVER_DEV_MODE=1"),
        ({"missing": {"/weight_info"}}, "cannot be given weights.*VLLM_SERVER_DEV_MODE=1"),
        ({"enable_return_routed_experts": False}, r"vLLM 0\.30\.0 at .* does not return routes.*--enable-return"),
        ({"logprobs_mode": "raw_logprobs"}, "found raw_logprobs.*--logprobs-mode processed_logprobs"),
        ({"max_model_len": 8}, "expected 16 tokens, found --max-model-len 8"),
        ({"release": "0.29.0"}, r"vLLM 0\.29\.0 at .* cannot be used.*vllm>=0\.30,<0\.34"),
        ({"config": {"nothing": 1}}, "cannot be read"),
    ],
)
def test_servers_that_cannot_be_trained_with_are_refused_at_start(server: Server, change: Any, text: str) -> None:
    for name, value in change.items():
        if name in vars(server):
            setattr(server, name, value)
        else:
            server.config["model_config"][name] = value
    with server.client(max_length=16) as engine, pytest.raises(EngineError, match=text):
        _ = engine.weight_version
    assert "/inference/v1/generate" not in server.asked


def test_the_setting_of_routes_that_0_31_moved() -> None:
    config = {"model_config": {}, "parallel_config": {}, "aux_output_config": {"enable_return_routed_experts": True}}
    assert ServerSettings.parse({"vllm_config": config}).returns_routes
    config["aux_output_config"] = {"enable_return_routed_experts": False}
    assert ServerSettings.parse({"vllm_config": config}).returns_routes is False


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"routed_experts": None}, "returned no routes.*--enable-return-routed-experts"),
        ({"routed_experts": npy(ROUTES * 0)}, r"vLLM 0\.30\.0 returned an all-zero capture"),
        ({"routed_experts": npy(ROUTES[:, [1, 2, 0]])}, "in a layer that has no router.*axis is shifted"),
        ({"routed_experts": npy(ROUTES[:, 1:])}, "another number of layers.*counts MoE layers only"),
        ({"routed_experts": npy(ROUTES[:1])}, "fewer rows than tokens"),
        ({"routed_experts": npy(np.where(ROUTES == 7, 11, ROUTES))}, "physical copies that an expert load balancer"),
        ({"logprobs": {"content": [{"logprob": -1.0}]}}, "log-probs of other tokens"),
    ],
)
def test_a_capture_that_cannot_be_true(server: Server, changes: dict[str, Any], text: str) -> None:
    server.choice = changes
    with server.client() as engine, pytest.raises(EngineError, match=text):
        engine.generate([[5, 6]], SamplingParams())


def test_a_server_without_its_route_for_tokens(server: Server) -> None:
    server.disabled = {"/inference/v1/generate"}
    with server.client() as engine, pytest.raises(EngineError, match=r"does not serve .*--enable-scale-out"):
        engine.generate([[5, 6]], SamplingParams())


def test_a_seed_that_would_end_a_server(server: Server) -> None:
    server.config |= {"device_config": {"device": "cpu"}, "scheduler_config": {"enable_chunked_prefill": True}}
    with server.client() as engine:
        engine.generate([[5, 6]], SamplingParams())
        with pytest.raises(EngineError, match="--no-enable-chunked-prefill"):
            engine.generate([[5, 6]], SamplingParams(seed=1))


def test_sleep_is_asked_for_where_the_server_can(server: Server) -> None:
    server.config["model_config"]["enable_sleep_mode"] = True
    with server.client() as engine:
        engine.sleep()
        with pytest.raises(EngineError, match="is asleep"):
            engine.generate([[5, 6]], SamplingParams())
        engine.wake()
        engine.generate([[5, 6]], SamplingParams())
    assert server.asked.index("/sleep") < server.asked.index("/wake_up")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("carrier pigeon", "unknown weight transport"),
        ("nccl", """not started to take weights by nccl.*--weight-transfer-config '{"backend": "nccl"}'"""),
        ("ipc", "found weight transfer by nothing"),
    ],
)
def test_ways_of_weights_that_a_server_does_not_have(kind: str, text: str) -> None:
    with pytest.raises(EngineError, match=text):
        weight_route(kind, ServerSettings(), "http://a:1", lambda path, body: None, None)


@pytest.mark.parametrize("fails", [False, True])
def test_memory_of_a_gpu_is_offered_by_the_endpoints_of_vllm(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    packing = pytest.importorskip("vllm.distributed.weight_transfer.packed_tensor", reason="vLLM is not installed here")
    asked: list[tuple[str, Any]] = []

    def post(path: str, body: Any) -> None:
        asked.append((path, body))
        if fails and path == "/update_weights":
            raise EngineError("out of memory")

    def produced(iterator: Any, gpu_uuid: str, **_: Any) -> Iterator[Any]:
        for name, tensor in iterator:
            about = {"names": [name], "dtype_names": ["float32"], "shapes": [list(tensor.shape)], "tensor_sizes": [4]}
            yield SimpleNamespace(**about, ipc_handle={gpu_uuid: ("handle",)})

    monkeypatch.setattr(packing, "packed_ipc_producer", produced)  # and what else needs a GPU
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    send = weight_route("ipc", ServerSettings(transfer_backend="ipc"), "http://a:1", post, None)
    if fails:
        with pytest.raises(EngineError, match="out of memory"):
            send(WEIGHTS.items())
    else:
        send(WEIGHTS.items())
    updates = 1 if fails else 2
    first, last = ["/init_weight_transfer_engine", "/start_weight_update"], "/finish_weight_update"
    assert [path for path, _ in asked] == [*first, *["/update_weights"] * updates, last]  # else it refuses the next one
    assert asked[0][1] == {"init_info": {"packed": True}}
    assert asked[2][1]["update_info"].keys() >= {
        "names",
        "dtype_names",
        "shapes",
        "tensor_sizes",
        "ipc_handles_pickled",
    }


def test_several_plain_servers_are_a_pool(server: Server, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.config.save_pretrained(tmp_path)
    with server.client() as client:
        request = StartRequest(model=str(tmp_path), urls=(client.url,), max_length=16)
        engine = start_engine("vllm_serve", request)
        assert (str(engine.name), engine.weight_version) == ("1 x vLLM 0.30.0", 0)
        engine.close()


def test_the_probe_asks_every_replica(server: Server) -> None:
    """The server loads weights in all of its replicas, and answers for the first alone."""
    server.config["parallel_config"]["data_parallel_size"] = 3
    with server.client() as engine:
        engine.update_weights(WEIGHTS.items(), 1, PROBE, "x")
        assert [one for one in server.replicas if one] == ["0", "1", "2"]
        server.scored_by["2"] = [-1.0, -5.0]
        with pytest.raises(EngineError, match=r"replica 2.*does not compute with the weights"):
            engine.update_weights(WEIGHTS.items(), 2, PROBE, "y")
