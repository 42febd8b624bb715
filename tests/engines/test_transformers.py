"""The Transformers engine: exact routes and log-probs, whatever is batched together."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import moe_replay as mr
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.errors import EngineError, EngineUnavailableError
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.weights.checkpoint import checkpoint_tensors, packed, read_tensors
from moe_replay.weights.identity import Probe
from tests.engines.tiny import VOCABULARY, Pause, assert_sampled_from, reference, tiny_model

FAMILIES = ("qwen3_moe", "mixtral", "olmoe")


@cache
def engine_of(family: str) -> TransformersEngine:
    return TransformersEngine(tiny_model(family), batch_size=8)


def detached(engine: TransformersEngine, check) -> None:
    """Run a check on the model without its controller."""
    engine._replay.detach()
    try:
        check(engine.model)
    finally:
        engine._replay = mr.attach(engine.model)


prompts = st.lists(st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=12), min_size=1, max_size=5)


@settings(max_examples=12)
@given(
    family=st.sampled_from(FAMILIES),
    asked=prompts,
    n=st.integers(1, 3),
    max_tokens=st.integers(1, 8),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
)
def test_samples_are_those_of_one_full_forward(family, asked, n, max_tokens, temperature) -> None:
    engine = engine_of(family)
    params = SamplingParams(n=n, max_tokens=max_tokens, temperature=temperature, seed=5)
    groups = engine.generate(asked, params)
    assert [len(group) for group in groups] == [n] * len(asked)

    def check(model: nn.Module) -> None:
        for prompt, group in zip(asked, groups, strict=True):
            for sample in group:
                assert sample.prompt_ids.tolist() == prompt
                assert len(sample.completion_ids) == max_tokens
                assert sample.finish_reason is FinishReason.LENGTH
                assert_sampled_from(model, sample, temperature or 1.0)

    detached(engine, check)


def same(one: Sample, other: Sample) -> bool:
    return np.array_equal(one.completion_ids, other.completion_ids) and one.finish_reason == other.finish_reason


def test_a_seed_makes_a_sample_whatever_is_beside_it() -> None:
    engine = engine_of("qwen3_moe")
    params = SamplingParams(n=2, max_tokens=8, seed=11)
    alone = engine.generate([[3, 1, 4]], params)[0]
    among = engine.generate([[9, 9], [3, 1, 4], list(range(1, 20))], params)
    assert all(same(one, other) for one, other in zip(alone, among[1], strict=True))
    assert not same(alone[0], alone[1])
    assert not same(alone[0], engine.generate([[3, 1, 4]], SamplingParams(n=2, max_tokens=8, seed=12))[0][0])
    assert not np.array_equal(among[0][0].completion_ids, among[1][0].completion_ids)


def test_stop_tokens_end_a_sample_and_belong_to_it() -> None:
    engine = engine_of("mixtral")
    free = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=12, seed=1))[0][0]
    stop = int(free.completion_ids[4])
    first = free.completion_ids.tolist().index(stop)
    ended = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=12, seed=1, stop_token_ids=(stop,)))[0][0]
    assert ended.finish_reason is FinishReason.STOP
    assert ended.completion_ids.tolist() == free.completion_ids[: first + 1].tolist()
    detached(engine, lambda model: assert_sampled_from(model, ended))


def test_the_models_own_end_token() -> None:
    engine = TransformersEngine(tiny_model("mixtral"))
    free = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=9, seed=1))[0][0]
    engine.model.generation_config.eos_token_id = [int(free.completion_ids[2])]
    assert len(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=9, seed=1))[0][0].completion_ids) <= 3
    ignored = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=9, seed=1, ignore_eos=True))[0][0]
    assert same(ignored, free)


def test_samples_of_one_batch_end_at_their_own_time() -> None:
    engine = TransformersEngine(tiny_model("olmoe"), max_length=20)
    long, short = engine.generate([[1] * 15, [2] * 3], SamplingParams(max_tokens=30, seed=1))
    assert (len(long[0].completion_ids), len(short[0].completion_ids)) == (5, 17)
    engine.close()
    assert_sampled_from(engine.model, long[0])
    assert_sampled_from(engine.model, short[0])


@pytest.mark.parametrize("prompt", [[], [1] * 20])
def test_prompts_that_cannot_be_continued(prompt: list[int]) -> None:
    engine = TransformersEngine(tiny_model("olmoe"), max_length=20)
    with pytest.raises(EngineError, match="is empty or as long as") as caught:
        engine.generate([[1], prompt], SamplingParams())
    assert caught.value.sample == 1


@pytest.mark.parametrize("form", ["folder", "checkpoint names", "names of the live model"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_replaced_in_place(family: str, form: str, tmp_path: Path) -> None:
    engine, other = TransformersEngine(tiny_model(family)), tiny_model(family, seed=1)
    before = [parameter.data_ptr() for parameter in engine.model.parameters()]
    other.save_pretrained(tmp_path)
    weights = {
        "folder": tmp_path,
        "checkpoint names": checkpoint_tensors(other),
        "names of the live model": other.state_dict().items(),
    }[form]
    ids = np.arange(1, 30)
    engine.update_weights(weights, version=3, probe=Probe(token_ids=ids, logprobs=reference(other, ids).logprobs))
    assert [parameter.data_ptr() for parameter in engine.model.parameters()] == before
    sample = engine.generate([[3, 2, 1]], SamplingParams(max_tokens=6, seed=0))[0][0]
    assert engine.weight_version == sample.weight_version == sample.trace.versions[0].version == 3
    assert_sampled_from(other, sample)


def test_checkpoint_names_are_those_on_disk(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    on_disk, live = dict(read_tensors(tmp_path)), dict(checkpoint_tensors(model))
    assert on_disk.keys() == live.keys()
    assert all(torch.equal(on_disk[name], live[name]) for name in live)


def test_conversions_of_a_model_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = pytest.importorskip("transformers.conversion_mapping")
    searched, search = [], mapping.get_model_conversion_mapping
    monkeypatch.setattr(
        mapping, "get_model_conversion_mapping", lambda *args, **more: searched.append(args) or search(*args, **more)
    )
    model = tiny_model("qwen3_moe")
    assert len(list(checkpoint_tensors(model))) > len(model.state_dict())  # experts were split
    assert len(searched) == 1


def test_weights_travel_in_chunks(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    chunks = list(packed(checkpoint_tensors(model), chunk_bytes=50_000))
    assert len(chunks) > 5
    largest = max(tensor.nbytes for tensor in model.state_dict().values())
    assert max(map(len, chunks)) < 50_000 + largest
    for number, chunk in enumerate(chunks):
        (tmp_path / f"{number}.safetensors").write_bytes(chunk)
    arrived = dict(read_tensors(tmp_path))
    assert all(torch.equal(arrived.pop(name), tensor) for name, tensor in checkpoint_tensors(model))
    assert not arrived


def test_an_update_that_fails_leaves_an_engine_that_refuses() -> None:
    engine, other = TransformersEngine(tiny_model("qwen3_moe")), tiny_model("qwen3_moe", seed=1)
    everything = list(checkpoint_tensors(other))
    with pytest.raises(EngineError, match="left parameters as they were"):
        engine.update_weights(iter(everything[:-1]), version=1)
    with pytest.raises(EngineError, match="did not succeed"):
        engine.generate([[1]], SamplingParams())
    with pytest.raises(EngineError, match="did not succeed"):
        engine.prompt_logprobs([1, 2, 3])
    with pytest.raises(EngineError, match="no such parameter"):
        engine.update_weights(iter([("model.layers.0.nothing", torch.zeros(1))]), version=1)
    with pytest.raises(EngineError, match="wrong shape"):
        engine.update_weights(iter([("lm_head.weight", torch.zeros(1))]), version=1)
    engine.update_weights(iter(everything), version=1)
    assert engine.generate([[1]], SamplingParams())[0][0].weight_version == 1


def test_a_probe_finds_wrong_weights() -> None:
    engine, other, third = (tiny_model("qwen3_moe", seed) for seed in (0, 1, 2))
    engine = TransformersEngine(engine)
    ids = np.arange(1, 30)
    probe = Probe(token_ids=ids, logprobs=reference(third, ids).logprobs)
    with pytest.raises(EngineError, match="does not compute with the weights"):
        engine.update_weights(checkpoint_tensors(other), version=1, probe=probe)
    assert engine.weight_version == 0
    with pytest.raises(EngineError, match="did not succeed"):
        engine.generate([[1]], SamplingParams())


def test_log_probs_of_a_prompt() -> None:
    engine = TransformersEngine(tiny_model("olmoe"))
    found = engine.prompt_logprobs(range(1, 40))
    engine.close()
    np.testing.assert_allclose(found, reference(engine.model, np.arange(1, 40)).logprobs, atol=1e-5)


def test_a_sleeping_engine_refuses_until_it_wakes() -> None:
    engine = engine_of("olmoe")
    engine.sleep()
    with pytest.raises(EngineError, match="is asleep"):
        engine.generate([[1]], SamplingParams())
    engine.wake()
    assert engine.generate([[1]], SamplingParams())


def test_an_aborted_sample_is_whole_as_far_as_it_went() -> None:
    engine = TransformersEngine(tiny_model("olmoe"))
    paused = Pause(engine.model, forwards=5)
    result: list[list[Sample]] = []
    thread = threading.Thread(
        target=lambda: result.extend(engine.generate([[1, 2], [3]], SamplingParams(max_tokens=250, seed=1)))
    )
    thread.start()
    with paused:
        engine.abort()
    thread.join()
    engine.close()
    for (sample,) in result:
        assert sample.finish_reason is FinishReason.ABORT
        assert len(sample.completion_ids) == 5
        assert_sampled_from(engine.model, sample)


def test_a_call_that_runs_when_the_engine_is_closed_raises() -> None:
    """Its routers have their hooks until it has ended."""
    engine = TransformersEngine(tiny_model("olmoe"))
    paused, errors = Pause(engine.model, forwards=3), []

    def ask() -> None:
        try:
            engine.generate([[1, 2]], SamplingParams(max_tokens=50))
        except EngineError as error:
            errors.append(error)

    asking, closing = threading.Thread(target=ask), threading.Thread(target=engine.close)
    asking.start()
    with paused:
        closing.start()
        while closing.is_alive() and not engine._abort.is_set():  # by then it is closed
            time.sleep(0.001)
    asking.join()
    closing.join()
    assert [type(error) for error in errors] == [EngineUnavailableError]
    with pytest.raises(EngineUnavailableError, match="is closed"):
        engine.generate([[1, 2]], SamplingParams(max_tokens=2))


def test_prompts_one_by_one_from_a_running_loop() -> None:
    engine = engine_of("qwen3_moe")
    params = SamplingParams(max_tokens=4, seed=2)

    async def both() -> list[list[Sample]]:
        return await asyncio.gather(engine.generate_one([1, 2], params), engine.generate_one([3, 4, 5], params))

    for one, other in zip(asyncio.run(both()), engine.generate([[1, 2], [3, 4, 5]], params), strict=True):
        assert same(one[0], other[0])


def test_a_trainer_may_share_its_model_and_controller() -> None:
    model = tiny_model("qwen3_moe").train()
    replay = mr.attach(model)
    engine = TransformersEngine(model, replay=replay)
    sample = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=5))[0][0]
    assert model.training
    engine.close()
    batch = mr.RouteBatch.from_traces([sample.trace], mr.TokenLayout.padded([len(sample.trace)]))
    with replay.replay(batch):
        model(input_ids=torch.tensor(sample.trace.token_ids[None], dtype=torch.long))


@pytest.mark.parametrize("waiting", [False, True], ids=["running", "waiting"])
def test_a_call_that_is_cancelled_ends_after_the_token_at_hand(waiting: bool) -> None:
    """Its thread would keep the engine from the next call, to the end of samples that nobody gets."""
    engine, forwards = TransformersEngine(tiny_model("olmoe")), []
    params = SamplingParams(max_tokens=1000, ignore_eos=True)

    async def cancel() -> None:
        paused = Pause(engine.model, forwards=4)
        call = asyncio.ensure_future(engine.generate_one([1, 2], params))
        await asyncio.to_thread(paused.__enter__)
        engine.model.register_forward_hook(lambda *_: forwards.append(1))
        second = [asyncio.ensure_future(engine.generate_one([1, 2], params))] if waiting else []
        await asyncio.sleep(0)  # it waits for its turn
        for each in (call, *second):
            each.cancel()
        await asyncio.gather(call, *second, return_exceptions=True)
        paused.__exit__()

    asyncio.run(cancel())  # which waits for its threads
    assert not forwards
    assert engine.generate([[1, 2]], SamplingParams(max_tokens=1))
