"""What a plain `vllm serve` returns: read as it is, and refused where it is not what it must be."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_replay.engines.base import StartRequest
from moe_replay.engines.registry import start_engine, start_sampler
from moe_replay.engines.requests import sampled_version
from moe_replay.engines.vllm_serve.client import VllmServeClient
from moe_replay.errors import EngineError
from moe_replay.records import SamplingParams
from moe_replay.routes.topology import MoeLayer, MoeTopology
from tests.engines.serving import serving
from tests.engines.tiny import tiny_model

TOPOLOGY = MoeTopology(3, (MoeLayer(1, 8, 2), MoeLayer(2, 8, 2)))


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def choice(**changes: Any) -> dict[str, Any]:
    """A choice as vLLM 0.30.0 writes it: 2 tokens of prompt, 2 of completion, 3 rows of routes, layer 0 dense."""
    routes = np.tile(np.array([[0, 0], [3, 1], [7, 2]], np.uint8), (3, 1, 1))
    written = {
        "index": 0,
        "token_ids": [8, 9],
        "prompt_token_ids": [5, 6],
        "routed_experts": npy(routes),
        "logprobs": {"token_logprobs": [-1.5, -0.5]},
        "finish_reason": "length",
    }
    return written | changes


def sampler(url: str) -> VllmServeClient:
    return VllmServeClient(url, TOPOLOGY, vocabulary=20, model="model", weight_version=4, takes_weights=False)


@contextmanager
def answering(answer: dict[str, Any], requests: list[Any] | None = None) -> Iterator[VllmServeClient]:
    pytest.importorskip("starlette", reason="the stand-in for the server needs starlette, which comes with vLLM")
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def completions(request: Any) -> Any:
        if requests is not None:
            requests.append(await request.json())
        return JSONResponse({"choices": [answer]})

    app = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])
    with serving(app) as url, sampler(url) as client:
        yield client


def test_a_choice_becomes_a_sample() -> None:
    with answering(choice()) as client:
        ((sample,),) = client.generate([[5, 6]], SamplingParams())
    assert sample.trace.token_ids.tolist() == [5, 6, 8, 9]
    assert sample.trace.layers == (1, 2)
    assert sample.trace.routed_experts[:3].tolist() == [[[3, 1], [7, 2]]] * 3
    assert sample.trace.valid.all(axis=1).tolist() == [True, True, True, False]
    assert sample.logprobs.tolist() == [-1.5, -0.5]
    assert sample.weight_version == 4


def test_defaults_of_the_server_do_not_change_the_sampling_and_prompts_have_seeds_of_their_own() -> None:
    """vLLM takes what a request leaves out from the model's generation_config.json."""
    requests: list[Any] = []
    with answering(choice(prompt_token_ids=None), requests) as client:
        client.generate([[5, 6], [6, 5]], SamplingParams(seed=3))
    assert all(request.items() >= {"min_p": 0.0, "repetition_penalty": 1.0, "top_k": 0}.items() for request in requests)
    assert len({request["seed"] for request in requests}) == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"routed_experts": None}, "--enable-return-routed-experts"),
        ({"token_ids": None}, "returned no routes"),
        ({"prompt_token_ids": [5, 7]}, "another prompt"),
        ({"routed_experts": "no base64!"}, "cannot be read"),
        ({"routed_experts": base64.b64encode(b"no array").decode()}, "cannot be read"),
        ({"routed_experts": npy(np.array([object()]))}, "unknown way.*found object"),
        ({"routed_experts": npy(np.zeros((3, 3, 2), np.uint8))}, "all-zero capture"),
        ({"routed_experts": npy(np.zeros((3, 4, 2), np.uint8))}, "another number of layers"),
    ],
)
def test_a_choice_that_cannot_be_true(changes: dict[str, Any], text: str) -> None:
    with answering(choice(**changes)) as client, pytest.raises(EngineError, match=text):
        client.generate([[5, 6]], SamplingParams())


def test_the_version_that_sampled_a_completion() -> None:
    """vLLM 0.32 says it of spans of tokens, earlier ones do not."""
    before, after = ({"start": start, "version": f"{4 + start}@run"} for start in (0, 1))
    assert sampled_version(None, "vLLM", 0) is None
    assert sampled_version([before, before], "vLLM", 0) == "4@run"
    with pytest.raises(EngineError, match=r"vLLM sampled one completion from several .*\[sample 3\].*'4@run', '5@run'"):
        sampled_version([before, after], "vLLM", 3)


def test_log_probs_of_another_distribution_are_refused() -> None:
    with answering(choice()) as client, pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        client.generate([[5, 6]], SamplingParams(temperature=0.7))


def test_a_plain_server_that_only_samples_need_not_be_reached_to_start(tmp_path: Path, port: int) -> None:
    model = tiny_model("qwen3_moe")
    model.config.save_pretrained(tmp_path)
    request = StartRequest(model=str(tmp_path), urls=(f"http://127.0.0.1:{port}",), options={"model": "tiny"})
    client = start_sampler("vllm_serve", request)
    assert client.topology == MoeTopology.from_config(model.config)
    assert not client.healthy()
    client.close()
    with pytest.raises(EngineError, match="cannot be reached"):  # training asks it what it has
        start_engine("vllm_serve", replace(request, options={}))
    two = start_sampler("vllm_serve", replace(request, urls=("http://a", "http://b")))
    two.close()


def test_a_client_that_only_samples_refuses_weights_and_masks() -> None:
    with answering(choice()) as client:
        with pytest.raises(EngineError, match=r"cannot be given weights.*only samples"):
            client.update_weights([], 5)
        with pytest.raises(EngineError, match="returns no sampling masks"):
            client.generate([[5, 6]], SamplingParams(sampling_mask=True))
        assert client.current_weights() == (4, "")
