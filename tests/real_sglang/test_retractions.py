"""Requests that the real SGLang takes back in the middle, keeping their tokens and log-probs (radixark/miles#3277)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from torch import nn

from moe_replay.engines.sglang.client import SglangClient
from moe_replay.engines.sglang.wire import GenerateResponse
from moe_replay.errors import EngineError
from moe_replay.interop.conventions import int32_rows
from moe_replay.records import Sample, SamplingParams
from tests.engines.tiny import assert_sampled_from, reference
from tests.real_sglang.models import sglang_model
from tests.real_sglang.server import sglang_server
from tests.real_sglang.test_training import saved, train_three_steps

pytest.importorskip("sglang", reason="the real SGLang is not installed here: see requirements/sglang-cpu.txt")

FAMILY = "glm4_moe"
FULL = "KV cache pool is full. Retract requests."
POOL = 350  # tokens that the cache holds: three of the samples below, but not four
PROMPT = [11, 5, 17, 2, 60, 33, 8]
PARAMS = SamplingParams(max_tokens=100)  # no token ends them. With ignore_eos SGLang would plan for their whole length
ALONE = SamplingParams(max_tokens=300)
ATTEMPTS = 20


class Observed(SglangClient):
    """Keeps what the server answered, before the client looks at it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.raw: list[dict[str, Any]] = []

    async def _generate(self, request: dict[str, Any]) -> Any:
        answer = await super()._generate(request)
        self.raw += answer if isinstance(answer, list) else [answer]
        return answer

    def completions(self, *, retracted: bool) -> set[tuple[int, ...]]:
        """The tokens of raw answers."""
        return {
            tuple(answer["output_ids"])
            for answer in self.raw
            if (answer["meta_info"]["num_retractions"] > 0) is retracted
        }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server with little room and no caution, and its model; what it prints is in `log`, beside the model."""
    model = saved(tmp_path_factory.mktemp(FAMILY))
    little = ("--max-total-tokens", str(POOL), "--schedule-conservativeness", "0")
    with sglang_server(model, *little, log=model / "log") as url:
        yield url, model


def test_three_steps(served: tuple[str, Path], tmp_path: Path) -> None:
    """First: the server has the weights that it was started with."""
    url, model = served
    train_three_steps(url, model, tmp_path / "run", max_tokens=40)
    assert FULL in (model / "log").read_text(), "nothing was retracted: nothing was shown"


def test_a_full_cache(served: tuple[str, Path]) -> None:
    """Six begin together. Those with the fewest tokens are retracted until the others are done, at most three."""
    url, model = served
    with Observed(url) as engine:
        engine.update_weights(model, 10)
        (samples,) = engine.generate([PROMPT], replace(PARAMS, n=6))
    returned = {tuple(sample.completion_ids.tolist()) for sample in samples}
    assert engine.completions(retracted=True), "nothing was retracted: nothing was shown"
    assert returned == engine.completions(retracted=False)
    for sample in samples:
        assert_sampled_from(sglang_model(FAMILY), sample)


@pytest.mark.parametrize(("seed", "version"), [(1, "11"), (2, None)])
def test_new_weights_while_requests_are_retracted(
    served: tuple[str, Path], tmp_path: Path, seed: int, version: str | None
) -> None:
    """Somebody else updates the server: the log-probs are of the old weights, the routes of the new ones."""
    url, model = served
    old, new = sglang_model(FAMILY), sglang_model(FAMILY, seed=seed)
    new.save_pretrained(tmp_path)
    with Observed(url) as engine:
        engine.update_weights(model, 10)
        sample = asyncio.run(sampled_meanwhile(engine, "retract", tmp_path, version))
        topology, name = engine.topology, engine.name
    first, second = (answer for answer in engine.raw if len(answer["output_ids"]) == ALONE.max_tokens)

    meta = first["meta_info"]
    assert meta["num_retractions"] == 1
    ids = np.asarray(PROMPT + first["output_ids"])
    routes = int32_rows(meta["routed_experts"], len(ids), topology, "SGLang", 0)[:, list(topology.layers)]
    assert agreement(routes, new, ids) == 1.0
    assert agreement(routes, old, ids) < 0.5
    logprobs = np.asarray([logprob for logprob, *_ in meta["output_token_logprobs"]])
    of_old, of_new = (np.abs(logprobs - reference(each, ids).logprobs[len(PROMPT) - 1 :]) < 2e-4 for each in (old, new))
    before = int(np.argmin(of_old))
    assert 5 <= before < ALONE.max_tokens
    assert of_old[:before].all()
    assert of_new[before:].all()
    assert not of_new[:before].all()

    assert second["meta_info"]["num_retractions"] == 0
    assert sample.completion_ids.tolist() == second["output_ids"]
    assert_sampled_from(new, sample)
    if version is not None:  # deterministic servers are not asked again
        assert [span["end"] for span in meta["weight_versions"]] == [before, ALONE.max_tokens]
        with pytest.raises(EngineError, match="one completion from several weight versions"):
            GenerateResponse(first, name, 0).to_sample(np.asarray(PROMPT), topology, engine._parse_version)


def test_new_weights_in_the_middle_of_a_request(served: tuple[str, Path], tmp_path: Path) -> None:
    """Somebody else updates the server, which goes on with the keys and values of the old weights."""
    url, model = served
    sglang_model(FAMILY, seed=3).save_pretrained(tmp_path)
    with Observed(url) as engine:
        engine.update_weights(model, 10)
        with pytest.raises(EngineError, match="one completion from several weight versions"):
            asyncio.run(sampled_meanwhile(engine, "in_place", tmp_path, "11"))
    assert engine.completions(retracted=True) == set()


async def sampled_meanwhile(engine: Observed, mode: str, folder: Path, version: str | None) -> Sample:
    """A sample that has begun when the weights in the folder are loaded, by calls that the engine knows nothing of."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as somebody:

        async def call(path: str, **content: Any) -> None:
            (await somebody.post(path, json=content)).raise_for_status()

        for _ in range(ATTEMPTS):
            sampling = asyncio.create_task(engine.generate_one(PROMPT, ALONE))
            await engine.generate_one([8, 9], SamplingParams(max_tokens=5))  # it began later
            await call("/pause_generation", mode=mode)
            done, _ = await asyncio.wait([sampling], timeout=2)
            if not done:
                break
            engine.raw.clear()  # it was done before the pause
            await call("/continue_generation")
        else:
            raise AssertionError("every sample was done before the pause")
        flush = mode == "retract"
        await call("/update_weights_from_disk", model_path=str(folder), flush_cache=flush, weight_version=version)
        await call("/continue_generation")
        (sample,) = await sampling
    return sample


def agreement(routes: np.ndarray, model: nn.Module, token_ids: np.ndarray) -> float:
    """Share of rows and layers with the experts that the model chooses."""
    expected = reference(model, token_ids).trace.routed_experts[:-1]
    return float((np.sort(routes, axis=-1) == np.sort(expected, axis=-1)).all(-1).mean())
