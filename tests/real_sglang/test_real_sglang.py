"""The client against the real SGLang on CPU, where requirements/sglang-cpu.txt is installed: `make test-sglang`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moe_replay.engines.session import Session
from moe_replay.engines.sglang.client import SglangClient
from moe_replay.errors import EngineError
from moe_replay.records import FinishReason, SamplingParams
from moe_replay.weights.checkpoint import checkpoint_tensors
from moe_replay.weights.identity import Probe
from tests.engines.serving import responds
from tests.engines.tiny import assert_sampled_from, reference
from tests.real_sglang.models import sglang_model
from tests.real_sglang.server import sglang_server

pytest.importorskip("sglang", reason="the real SGLang is not installed here: see requirements/sglang-cpu.txt")

LONG = list(range(1, 90))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangClient]:
    """A model with a dense first layer; prompts longer than 64 tokens are prefilled in chunks."""
    folder = tmp_path_factory.mktemp("glm4_moe")
    sglang_model("glm4_moe").save_pretrained(folder)
    with sglang_server(folder, "--chunked-prefill-size", "64") as url, SglangClient(url) as engine:
        yield engine


def test_what_it_is(engine: SglangClient) -> None:
    assert str(engine.name) == "SGLang 0.5.23"
    assert engine.topology.layers == (1, 2)
    assert engine.weight_version == 0
    assert responds(engine)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_routes_and_log_probs_are_those_of_transformers(engine: SglangClient, temperature: float) -> None:
    """With chunked prefill and cached prefixes, many at once."""
    params = SamplingParams(n=3, max_tokens=8, temperature=temperature)
    for group in engine.generate([[1, 2, 3], LONG, LONG[:70], LONG], params):
        assert len(group) == 3
        for sample in group:
            assert_sampled_from(sglang_model("glm4_moe"), sample, temperature or 1.0)


def test_prompt_log_probs(engine: SglangClient) -> None:
    expected = reference(sglang_model("glm4_moe"), np.asarray(LONG)).logprobs
    np.testing.assert_allclose(engine.prompt_logprobs(LONG), expected, atol=2e-4)


def test_new_weights_abort_and_resume(engine: SglangClient) -> None:
    """Last but for sleep: the engine goes on with the weights of version 2."""
    newer = {version: sglang_model("glm4_moe", seed=version) for version in (1, 2)}

    async def interrupted(session: Session) -> FinishReason:
        # More tokens than it samples while a busy machine writes the new weights: the update aborts it.
        turn = asyncio.create_task(session.generate(engine, SamplingParams(max_tokens=3500)))
        await engine.generate_one([8, 9], SamplingParams(max_tokens=10))  # it began later, so the turn has begun
        await asyncio.to_thread(engine.update_weights, checkpoint_tensors(newer[1]), 1)
        return await turn

    session = Session([5, 6, 7])
    assert asyncio.run(interrupted(session)) is FinishReason.ABORT
    before = len(session)
    assert before > 3, "aborted before it began: nothing was shown"
    asyncio.run(session.generate(engine, SamplingParams(max_tokens=before - 3 + 5)))
    trace = session.trace
    assert trace is not None
    assert trace.token_versions.tolist() == [0] * (before - 1) + [1] * 6
    for model, part in ((sglang_model("glm4_moe"), slice(0, before - 1)), (newer[1], slice(before - 1, before + 4))):
        expected = reference(model, session.token_ids).trace
        if part.start:  # what is cached of the old weights must not be read: the new ones see the whole sequence
            np.testing.assert_allclose(
                session.logprobs[before:], reference(model, session.token_ids).logprobs[before - 1 :], atol=2e-4
            )
        found, wanted = (np.sort(each.routed_experts[part], axis=-1) for each in (trace, expected))
        np.testing.assert_array_equal(found, wanted)


def test_a_probe_and_a_folder(engine: SglangClient, tmp_path: Path) -> None:
    model = sglang_model("glm4_moe", seed=2)
    model.save_pretrained(tmp_path)
    right = reference(model, np.asarray(LONG)).logprobs
    with pytest.raises(EngineError, match="does not compute with the weights"):
        engine.update_weights(tmp_path, 2, Probe(token_ids=LONG, logprobs=right - 1, tolerance=1e-3))
    with pytest.raises(EngineError, match="an update that did not succeed"):
        engine.generate([[1, 2, 3]], SamplingParams())
    engine.update_weights(tmp_path, 2, Probe(token_ids=LONG, logprobs=right, tolerance=1e-3))
    ((sample,),) = engine.generate([LONG], SamplingParams(max_tokens=4))
    assert sample.weight_version == engine.weight_version == 2
    assert_sampled_from(model, sample)


def test_sleep_and_wake(engine: SglangClient) -> None:
    """On CPU nothing is freed; the server must still answer as before."""
    version = engine.weight_version
    engine.sleep()
    with pytest.raises(EngineError, match="is asleep"):
        engine.generate([[1, 2, 3]], SamplingParams())
    engine.wake()
    ((sample,),) = engine.generate([LONG], SamplingParams(max_tokens=4))
    assert_sampled_from(sglang_model("glm4_moe", seed=version), sample)


def test_a_server_without_routes(tmp_path: Path) -> None:
    sglang_model("qwen3_moe").save_pretrained(tmp_path)
    with sglang_server(tmp_path, returns_routes=False) as url, SglangClient(url) as engine:
        with pytest.raises(EngineError, match="--enable-return-routed-experts"):
            engine.generate([[1, 2, 3]], SamplingParams())
        with pytest.raises(EngineError, match="ignores seeds"):
            engine.generate([[1, 2, 3]], SamplingParams(seed=1))
