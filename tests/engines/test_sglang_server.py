"""The client of SGLang against a stub server, which answers with what a real one said.

The answers in recorded/ come from SGLang 0.5.23 on CPU (tests/real_sglang/record.py), the weights of its models from
tests/real_sglang/models.py. The stub knows no other request than those that were recorded; what it says of weights,
sleep and errors is written by hand. tests/real_sglang runs the same client against the real server.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from moe_replay.engines.session import Session
from moe_replay.engines.sglang.client import SglangClient
from moe_replay.engines.transformers import sampled_logprobs
from moe_replay.errors import EngineError, EngineUnavailableError
from moe_replay.records import FinishReason, SamplingParams
from moe_replay.routes.topology import MoeLayer, MoeTopology
from moe_replay.weights.identity import Probe
from tests.engines.serving import responds, serving
from tests.engines.tiny import assert_sampled_from, reference
from tests.real_sglang.models import FAMILIES, sglang_model

RECORDED = Path(__file__).parent / "recorded"
SETTINGS = {"version": "0.5.23", "model_path": "somewhere/else", "enable_deterministic_inference": False}


@cache
def recording(name: str) -> dict[str, Any]:
    return json.loads((RECORDED / f"sglang_{name}.json").read_text())


@cache
def model(name: str) -> nn.Module:
    return sglang_model(recording(name)["family"], **recording(name)["changes"])


def case(name: str, which: str) -> tuple[list[int], SamplingParams, int]:
    """Prompt, parameters and first token of a recorded request."""
    request = recording(name)["cases"][which]["request"]
    sampling = request["sampling_params"]
    params = SamplingParams(
        n=2 if which == "two" else 1,
        max_tokens=sampling["max_new_tokens"],
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=max(0, sampling["top_k"]),
        stop_token_ids=tuple(sampling["stop_token_ids"]),
    )
    return request["input_ids"], params, request["routed_experts_start_len"]


class Stub:
    """A server with the recorded answers of one model, and a book of what it was asked."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.settings = SETTINGS | settings
        self.cases = copy.deepcopy(recording(name)["cases"])
        self.asked: list[tuple[str, Any]] = []
        self.version = "default"
        self.refusals: dict[str, int] = {}  # path: status
        self.original_logprobs = False
        self.on_update: Callable[[Path], object] = lambda folder: None
        self.always: str | None = None  # the case that answers every request

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def answer_of(self, which: str) -> dict[str, Any]:
        """One that is yet to be given, to be changed."""
        return self.cases[which]["answer"]

    def generate(self, request: dict[str, Any]) -> Any:
        if request.get("top_logprobs_num"):
            gap = 1 if self.original_logprobs else 1 / request["sampling_params"]["temperature"]
            return {"meta_info": {"output_top_logprobs": [[[-1.0, 3, None], [-1.0 - gap, 4, None]]]}}
        if request.get("logprob_start_len") == 0:
            scored = [[None if i == 0 else -2.0, token, None] for i, token in enumerate(request["input_ids"])]
            return {"meta_info": {"input_token_logprobs": scored}}
        if self.always:
            return self.answer_of(self.always)
        (answer,) = [each["answer"] for each in self.cases.values() if each["request"] == request]
        return answer

    def app(self) -> Any:
        pytest.importorskip("starlette", reason="the stand-in for the server needs starlette, which comes with vLLM")
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

        async def answer(request: Any) -> Any:
            path, content = request.url.path, json.loads(await request.body() or b"null")
            self.asked.append((path, content))
            if path in self.refusals:
                return JSONResponse({"error": {"message": "no"}}, self.refusals[path])
            if path == "/update_weights_from_disk":
                self.on_update(Path(content["model_path"]))
                self.version = content["weight_version"]
                return JSONResponse({"success": True, "message": "Succeeded"})
            answers: dict[str, Callable[[], Any]] = {
                "/generate": lambda: self.generate(content),
                "/server_info": lambda: self.settings,
                "/model_info": lambda: {"weight_version": self.version},
            }
            return JSONResponse(answers[path]()) if path in answers else Response("done")

        return Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])

    @contextmanager
    def client(self, topology: MoeTopology | None, **options: Any) -> Iterator[SglangClient]:
        with serving(self.app()) as url, SglangClient(url, topology=topology, **options) as client:
            yield client


TOPOLOGY = MoeTopology(3, (MoeLayer(1, 8, 2), MoeLayer(2, 8, 2)))  # of glm4_moe


@contextmanager
def stub(name: str = "glm4_moe", **settings: Any) -> Iterator[tuple[Stub, SglangClient]]:
    server = Stub(name, **settings)
    with server.client(MoeTopology.from_config(model(name).config), weight_version=3) as client:
        yield server, client


# ---- what a real server said ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("which", "reason"),
    [
        ("length", FinishReason.LENGTH),
        ("greedy", FinishReason.LENGTH),
        ("two", FinishReason.LENGTH),
        ("stop", FinishReason.STOP),
        ("temperature", FinishReason.LENGTH),
        ("aborted", FinishReason.ABORT),
        ("resumed", FinishReason.LENGTH),
    ],
)
def test_routes_and_log_probs_are_those_of_transformers(name: str, which: str, reason: FinishReason) -> None:
    prompt, params, _ = case(name, which)
    with stub(name) as (_, client):
        (samples,) = client.generate([prompt], params)
    assert len(samples) == params.n
    for sample in samples:
        assert_sampled_from(model(name), sample, params.temperature or 1.0)
        assert sample.finish_reason is reason
        assert sample.weight_version == 3
        assert sample.trace.versions[0].version == 3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stop_token_is_part_of_the_completion(name: str) -> None:
    prompt, params, _ = case(name, "stop")
    with stub(name) as (_, client):
        ((sample,),) = client.generate([prompt], params)
    assert sample.completion_ids[-1] in params.stop_token_ids
    assert len(sample.completion_ids) < params.max_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_of_what_top_k_and_top_p_leave(name: str) -> None:
    prompt, params, _ = case(name, "top_k")
    with stub(name) as (_, client):
        ((sample,),) = client.generate([prompt], params)
    ids = torch.tensor(sample.trace.token_ids[None].astype(np.int64))
    with torch.no_grad():
        logits = model(name)(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    expected = sampled_logprobs(logits, params).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    np.testing.assert_allclose(sample.logprobs, expected, atol=2e-4)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("which", ["first_token", "resumed_first_token"])
def test_routes_before_the_first_token_are_uncovered(name: str, which: str) -> None:
    prompt, params, first_token = case(name, which)
    with stub(name) as (_, client):
        (sample,) = asyncio.run(client.generate_from(prompt, params, first_token))
    trace, expected = sample.trace, reference(model(name), sample.trace.token_ids).trace
    covered = np.arange(len(trace))
    assert trace.valid.all(axis=1).tolist() == ((covered >= first_token) & (covered < len(trace) - 1)).tolist()
    found, wanted = (np.sort(each.routed_experts[first_token:-1], axis=-1) for each in (trace, expected))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_session_goes_on_after_an_abort(name: str) -> None:
    """The second answer has routes of the whole sequence: tokens keep those that they were sampled with."""
    prompt, params, _ = case(name, "aborted")
    more, rest, _ = case(name, "resumed")
    with stub(name) as (server, client):
        session = Session(prompt)
        assert asyncio.run(session.generate(client, params)) is FinishReason.ABORT
        assert session.token_ids.tolist() == more
        first = session.trace
        server.answer_of("resumed")["meta_info"] |= {"weight_version": "4", "weight_versions": None}
        done = len(more) - len(prompt)
        asyncio.run(session.generate(client, SamplingParams(max_tokens=done + rest.max_tokens)))
    assert session.trace is not None
    assert first is not None
    covered = len(first) - 1
    assert session.trace.token_versions[:covered].tolist() == [3] * covered
    assert set(session.trace.token_versions[covered:].tolist()) == {4}
    assert session.trace.valid[:-1].all()
    expected = reference(model(name), session.token_ids).trace
    found, wanted = (np.sort(each.routed_experts[:-1], axis=-1) for each in (session.trace, expected))
    np.testing.assert_array_equal(found, wanted)


def test_a_dense_layer_that_sglang_takes_for_a_mixture_is_refused() -> None:
    """Recorded: SGLang 0.5.23 ignores mlp_only_layers of qwen3_moe and routes with weights that nobody gave it."""
    name = "qwen3_moe_dense"
    prompt, params, _ = case(name, "greedy")
    with stub(name) as (_, client), pytest.raises(EngineError, match=r"a layer that has no router .*layer 0"):
        client.generate([prompt], params)


# ---- answers that cannot be true --------------------------------------------------------------------------------


def rewritten(meta: dict[str, Any], change: Callable[[np.ndarray], np.ndarray]) -> str:
    routes = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(-1, 3, 2).copy()
    return base64.b64encode(change(routes).tobytes()).decode()


def with_route(layer: int, experts: list[int]) -> Callable[[np.ndarray], np.ndarray]:
    def change(routes: np.ndarray) -> np.ndarray:
        routes[1, layer] = experts
        return routes

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda meta: {"routed_experts": None}, "--enable-return-routed-experts.* strip"),
        (lambda meta: {"routed_experts": "no base64!"}, "cannot be read"),
        (lambda meta: {"routed_experts": 7}, "must be base64.*int"),
        (lambda meta: {"routed_experts": meta["routed_experts"][:-4]}, "no whole number of rows"),
        (lambda meta: {"routed_experts": rewritten(meta, lambda r: r[1:])}, "fewer rows than tokens"),
        (lambda meta: {"routed_experts": rewritten(meta, lambda r: np.concatenate([r, r]))}, "more rows than tokens"),
        (lambda meta: {"routed_experts": rewritten(meta, np.zeros_like)}, "all-zero capture"),
        (lambda meta: {"routed_experts": rewritten(meta, with_route(0, [1, 2]))}, "no router .*layer 0, token 1"),
        (lambda meta: {"routed_experts": rewritten(meta, with_route(2, [8, 2]))}, "layer 2, token 1.*found.*8"),
        (lambda meta: {"routed_experts": rewritten(meta, with_route(2, [5, 5]))}, "cannot be true.*layer 2, token 1"),
        (lambda meta: {"prompt_tokens": 5}, "another prompt"),
        (lambda meta: {"output_token_logprobs": meta["output_token_logprobs"][1:]}, "other tokens than it sampled"),
        (
            lambda meta: {"output_token_logprobs": [[None, *rest] for _, *rest in meta["output_token_logprobs"]]},
            "not finite",
        ),
        (lambda meta: {"finish_reason": {"type": "tired"}}, "unknown reason"),
        (lambda meta: {"weight_version": "newest"}, "not a number"),
        (lambda meta: {"weight_versions": [{"version": "1"}, {"version": "2"}]}, "several weight versions"),
    ],
)
def test_an_answer_that_cannot_be_true(change: Callable[[dict[str, Any]], dict[str, Any]], text: str) -> None:
    prompt, params, _ = case("glm4_moe", "length")
    with stub() as (server, client):
        meta = server.answer_of("length")["meta_info"]
        meta |= change(meta)
        with pytest.raises(EngineError, match=text) as raised:
            client.generate([prompt], params)
    assert "SGLang" in str(raised.value)


def test_lost_samples() -> None:
    prompt, params, _ = case("glm4_moe", "two")
    with stub() as (server, client):
        server.cases["two"]["answer"].pop()
        with pytest.raises(EngineError, match="lost samples"):
            client.generate([prompt], params)


@pytest.mark.parametrize(("status", "kind"), [(503, EngineUnavailableError), (400, EngineError)])
def test_refusals(status: int, kind: type[EngineError]) -> None:
    prompt, params, _ = case("glm4_moe", "length")
    with stub() as (server, client):
        server.refusals["/generate"] = status
        with pytest.raises(EngineError) as raised:
            client.generate([prompt], params)
    assert type(raised.value) is kind


def test_health() -> None:
    with stub() as (server, client):
        assert responds(client)
        server.refusals["/health"] = 503
        assert not client.healthy()
    with SglangClient("http://127.0.0.1:9") as nobody:
        assert not nobody.healthy()


def test_a_request_that_was_aborted_while_it_waited() -> None:
    """Written by hand, as SGLang's source has it: no routes, and of a second wait tokens without routes."""
    prompt, params, _ = case("glm4_moe", "length")
    with stub() as (server, client):
        meta = server.answer_of("length")["meta_info"]
        del meta["routed_experts"], meta["prompt_tokens"], meta["weight_versions"]
        meta["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
        ((sample,),) = client.generate([prompt], params)
    assert sample.finish_reason is FinishReason.ABORT
    assert len(sample.completion_ids) == 0
    assert sample.trace.token_ids.tolist() == prompt
    assert not sample.trace.valid.any()


# ---- retractions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_retracted_sample_is_drawn_again(attempts: int) -> None:
    """Its log-probs are of the first pass, its routes of the second: valid one by one, and not a pair (miles#3277)."""
    prompt, params, _ = case("glm4_moe", "length")
    with stub() as (server, client):
        ((expected,),) = client.generate([prompt], params)
        right = server.answer_of("length")
        wrong = copy.deepcopy(right)
        wrong["meta_info"] |= {
            "num_retractions": 1,
            "routed_experts": rewritten(right["meta_info"], with_route(2, [7, 6])),
        }
        answers = [wrong] * attempts + [right]
        server.generate = lambda request: answers.pop(0)  # type: ignore[method-assign]
        ((sample,),) = client.generate([prompt], params)
    assert answers == []
    assert sample.trace == expected.trace
    assert sample.finish_reason is expected.finish_reason


def test_only_the_retracted_one_of_several_samples_is_drawn_again() -> None:
    prompt, params, _ = case("glm4_moe", "two")
    with stub() as (server, client):
        first, second = copy.deepcopy(server.answer_of("two"))
        wrong = copy.deepcopy(second)
        wrong["meta_info"]["num_retractions"] = 1
        answers: list[Any] = [[first, wrong], second]
        server.generate = lambda request: answers.pop(0)  # type: ignore[method-assign]
        client.generate([prompt], params)
        asked = [content["sampling_params"]["n"] for path, content in server.asked if path == "/generate"]
    assert asked == [2, 1]


def test_a_server_that_retracts_all_the_time_is_refused() -> None:
    prompt, params, _ = case("glm4_moe", "length")
    with stub() as (server, client):
        server.always = "length"
        server.answer_of("length")["meta_info"]["num_retractions"] = 2
        with pytest.raises(EngineError, match=r"retracted a request again and again.*4 attempts.*mem-fraction-static"):
            client.generate([prompt], params)
        assert server.paths.count("/generate") == 4


def test_a_deterministic_server_may_retract() -> None:
    """It computes the same routes the second time."""
    prompt, params, _ = case("glm4_moe", "length")
    with stub(enable_deterministic_inference=True) as (server, client):
        server.always = "length"
        server.answer_of("length")["meta_info"]["num_retractions"] = 1
        client.generate([prompt], params)
        assert server.paths.count("/generate") == 1


def test_a_deterministic_server_that_retracts_for_new_weights_is_refused() -> None:
    """It says so in the versions of the tokens alone: the second pass is of other weights than the first."""
    prompt, params, _ = case("glm4_moe", "length")
    with stub(enable_deterministic_inference=True) as (server, client):
        server.always = "length"
        spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
        meta = server.answer_of("length")["meta_info"]
        meta |= {"num_retractions": 1, "weight_version": "4", "weight_versions": spans}
        with pytest.raises(EngineError, match="one completion from several weight versions"):
            client.generate([prompt], params)


def test_a_retracted_sample_that_was_aborted_starts_from_its_prompt() -> None:
    prompt, params, _ = case("glm4_moe", "length")
    with stub() as (server, client):
        meta = server.answer_of("length")["meta_info"]
        meta |= {"num_retractions": 1, "finish_reason": {"type": "abort", "message": "Abort"}}
        ((sample,),) = client.generate([prompt], params)
        assert (sample.finish_reason, len(sample.completion_ids)) == (FinishReason.ABORT, 0)
        assert server.paths.count("/generate") == 1


def test_a_retracted_sample_without_routes_is_kept() -> None:
    prompt, params, _ = case("glm4_moe", "length")
    with stub() as (server, client):
        server.always = "length"
        server.answer_of("length")["meta_info"]["num_retractions"] = 2
        ((sample,),) = client.generate([prompt], dataclasses.replace(params, routes=False))
        assert server.paths.count("/generate") == 1
    assert sample.finish_reason is FinishReason.LENGTH


def test_a_sample_that_is_aborted_when_it_is_drawn_for_the_last_time_is_no_error() -> None:
    prompt, params, _ = case("glm4_moe", "length")
    with stub() as (server, client):
        retracted = copy.deepcopy(server.answer_of("length"))
        retracted["meta_info"]["num_retractions"] = 1
        aborted = copy.deepcopy(retracted)
        aborted["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort"}
        answers = [retracted] * 3 + [aborted]
        server.generate = lambda request: answers.pop(0)  # type: ignore[method-assign]
        ((sample,),) = client.generate([prompt], params)
    assert (sample.finish_reason, len(sample.completion_ids)) == (FinishReason.ABORT, 0)


# ---- log-probs and seeds ----------------------------------------------------------------------------------------


def test_log_probs_at_another_temperature_are_refused() -> None:
    prompt, params, _ = case("glm4_moe", "temperature")
    with stub() as (server, client):
        server.original_logprobs = True
        with pytest.raises(EngineError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
            client.generate([prompt], params)


def test_the_temperature_is_looked_at_once() -> None:
    prompt, params, _ = case("glm4_moe", "temperature")
    with stub() as (server, client):
        client.generate([prompt], params)
        client.generate([prompt], params)
    assert server.paths.count("/generate") == 2 + 2


def test_top_p_alone_is_refused() -> None:
    with stub() as (_, client), pytest.raises(EngineError, match="top_p alone"):
        client.generate([[1, 2]], SamplingParams(top_p=0.9))


def test_a_seed_that_would_be_ignored_is_refused() -> None:
    with stub() as (_, client), pytest.raises(EngineError, match="--enable-deterministic-inference"):
        client.generate([[1, 2]], SamplingParams(seed=1))


def test_a_server_that_samples_by_seeds_is_sent_one_for_each_sample() -> None:
    """Without one it would take 42 for all of them; the answers are those of unseeded requests."""
    prompt, params, _ = case("glm4_moe", "length")
    seeds = []
    with stub(enable_deterministic_inference=True) as (server, client):
        server.always = "length"
        for seed in (None, 7, 7, 8):
            server.asked.clear()
            client.generate([prompt], SamplingParams(n=3, max_tokens=params.max_tokens, seed=seed))
            sent = [content["sampling_params"] for path, content in server.asked if path == "/generate"]
            assert [sampling["n"] for sampling in sent] == [1, 1, 1]
            seeds.append({sampling["sampling_seed"] for sampling in sent})
    assert [len(each) for each in seeds] == [3, 3, 3, 3]
    assert seeds[1] == seeds[2]
    assert not seeds[1] & seeds[3]
    assert not seeds[0] & seeds[1]


# ---- weights, sleep, abort --------------------------------------------------------------------------------------


def test_an_update_pauses_loads_flushes_and_stamps(tmp_path: Path) -> None:
    probe = Probe(token_ids=[1, 2, 3], logprobs=np.full(2, -2.0, np.float32), tolerance=1e-3)
    with stub() as (server, client):
        assert client.weight_version == 3
        model("glm4_moe").save_pretrained(tmp_path)
        server.asked.clear()
        client.update_weights(tmp_path, 9, probe)
        orders = ["/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation", "/generate"]
        assert [path for path in server.paths if path != "/server_info"] == orders
        assert dict(server.asked)["/pause_generation"] == {"mode": "abort"}
        assert dict(server.asked)["/update_weights_from_disk"]["model_path"] == str(tmp_path)
        assert client.weight_version == 9


def test_requests_wait_for_an_update(tmp_path: Path) -> None:
    model("glm4_moe").save_pretrained(tmp_path)
    prompt, params, _ = case("glm4_moe", "length")
    sampled: list[Future[Any]] = []

    def sample_meanwhile(folder: Path) -> None:
        sampled.append(threads.submit(client.generate, [prompt], params))
        time.sleep(0.3)  # a request that does not wait reaches the server now

    with stub() as (server, client), ThreadPoolExecutor(1) as threads:
        client.generate([prompt], params)
        server.asked.clear()
        server.on_update = sample_meanwhile
        client.update_weights(tmp_path, 9)
        sampled[0].result()
    assert server.paths.index("/generate") > server.paths.index("/continue_generation")


def test_samples_of_weights_that_were_not_sent_are_refused(tmp_path: Path) -> None:
    """A server that restarts has its start weights, under a version that may be that of the update."""
    model("glm4_moe").save_pretrained(tmp_path)
    prompt, params, _ = case("glm4_moe", "length")
    with stub() as (server, client):
        client.update_weights(tmp_path, 3, weights_id="run-3-a")
        assert client.current_weights() == (3, "run-3-a")
        server.answer_of("length")["meta_info"] |= {"weight_version": "3@run-3-a", "weight_versions": None}
        ((sample,),) = client.generate([prompt], params)
        assert (sample.weight_version, sample.weights_id) == (3, "run-3-a")
        server.answer_of("length")["meta_info"]["weight_version"] = server.version = "default"
        with pytest.raises(EngineUnavailableError, match=r"not sent.*update run-3-a.*version 3 of no update"):
            client.generate([prompt], params)


def test_an_iterator_is_written_where_the_server_can_read_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    read: dict[str, torch.Tensor] = {}
    weights = [("first", torch.ones(2)), ("second", torch.zeros(3, 2))]
    server = Stub("glm4_moe")
    server.on_update = lambda folder: [read.update(load_file(file)) for file in folder.glob("*.safetensors")]
    with server.client(TOPOLOGY, shared_folder=tmp_path) as client:
        client.update_weights(iter(weights), 4)
        sent = Path(dict(server.asked)["/update_weights_from_disk"]["model_path"])
    assert sent.parent == tmp_path
    assert {name: tensor.tolist() for name, tensor in read.items()} == {n: t.tolist() for n, t in weights}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", ["/update_weights_from_disk", "/flush_cache", "probe"])
def test_after_an_update_that_failed_nothing_is_sampled(tmp_path: Path, failing: str) -> None:
    model("glm4_moe").save_pretrained(tmp_path)
    prompt, params, _ = case("glm4_moe", "length")
    wrong = Probe(token_ids=[1, 2, 3], logprobs=np.full(2, -3.0, np.float32))
    with stub() as (server, client):
        server.refusals = {failing: 400} if failing != "probe" else {}
        with pytest.raises(EngineError):
            client.update_weights(tmp_path, 9, wrong)
        assert "/continue_generation" in server.paths
        with pytest.raises(EngineError, match="an update that did not succeed"):
            client.generate([prompt], params)
        server.refusals = {}
        client.update_weights(tmp_path, 10)
        client.generate([prompt], params)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    prompt, params, _ = case("glm4_moe", "length")
    with stub() as (_, client):
        with pytest.raises(EngineError, match="no weights in the folder"):
            client.update_weights(tmp_path, 1)
        client.generate([prompt], params)


@pytest.mark.parametrize(("backup", "tags"), [(False, ["kv_cache"]), (True, ["kv_cache", "weights"])])
def test_sleep_frees_only_what_comes_back(backup: bool, tags: list[str]) -> None:
    prompt, params, _ = case("glm4_moe", "length")
    with stub(enable_weights_cpu_backup=backup) as (server, client):
        client.sleep()
        assert dict(server.asked)["/release_memory_occupation"] == {"tags": tags}
        assert server.paths.index("/pause_generation") < server.paths.index("/release_memory_occupation")
        with pytest.raises(EngineError, match="is asleep"):
            client.generate([prompt], params)
        client.wake()
        assert server.asked[-1] == ("/resume_memory_occupation", {"tags": tags})
        client.generate([prompt], params)


def test_abort() -> None:
    with stub() as (server, client):
        client.abort()
    assert server.asked == [("/abort_request", {"abort_all": True})]


def test_the_topology_comes_from_the_model(tmp_path: Path) -> None:
    model("glm4_moe").save_pretrained(tmp_path)
    with Stub("glm4_moe").client(None) as client, pytest.raises(EngineError, match="cannot be read on this machine"):
        client.topology  # noqa: B018
    with Stub("glm4_moe", model_path=str(tmp_path)).client(None) as client:
        assert client.topology.layers == (1, 2)
    with Stub("glm4_moe").client(None, model_path=tmp_path) as client:
        assert client.topology.layers == (1, 2)
        assert str(client.name) == "SGLang 0.5.23"


def test_routes_can_be_left_out_for_the_prompt_only() -> None:
    with stub() as (_, client), pytest.raises(EngineError, match="first_token from 0 to 2"):
        asyncio.run(client.generate_from([1, 2], SamplingParams(), 3))
