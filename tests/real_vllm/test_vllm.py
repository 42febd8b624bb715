"""The real vLLM on CPU in float32: its routes are those that Transformers computes on the same tokens and weights.

DeepSeek-V3 is not among the families: vLLM's attention for it on CPU differs from Transformers' (docs/engines.md).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import moe_replay as mr
from moe_replay.engines.server.client import RolloutClient
from moe_replay.errors import EngineError, EngineUnavailableError
from moe_replay.interop.capture import is_unrouted
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.tools.attribution import attribute
from moe_replay.verification.attribution import NATIVE, R3
from moe_replay.verification.thresholds import failures
from moe_replay.weights.checkpoint import checkpoint_tensors
from moe_replay.weights.identity import Probe
from tests.engines.serving import serving
from tests.engines.tiny import VOCABULARY, assert_sampled_from, reference, tiny_model
from tests.models import perturb_routers
from tests.real_vllm.conftest import NEEDS_VLLM

TOKEN = "open sesame"
FAMILIES = ("qwen3_moe", "mixtral", "olmoe")
PROBE = list(range(1, 60))


def prompts(number: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(1, VOCABULARY, random.integers(1, longest + 1)).tolist() for _ in range(number)]


def probe(model: nn.Module) -> Probe:
    return Probe(token_ids=PROBE, logprobs=reference(model, np.array(PROBE)).logprobs, tolerance=1e-3)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(vllm_engine: Callable[[str], Any], family: str) -> Any:
    return vllm_engine(family)


@pytest.fixture
def qwen(vllm_engine: Callable[[str], Any]) -> Iterator[Any]:
    """The engine with prefix cache, chunked prefill and few blocks, with its first weights before and after."""
    engine = vllm_engine("qwen3_moe")
    yield engine
    if engine.weight_version or not engine._state.weights_complete:
        engine.update_weights(checkpoint_tensors(tiny_model("qwen3_moe")), version=0)


def counter(name: str) -> float:
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return sum(metric.value for metric in get_metrics_snapshot() if metric.name == f"vllm:{name}")


# ---- routes and log-probs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_samples_are_those_of_the_model(engine: Any, family: str, temperature: float) -> None:
    asked = prompts(6)
    groups = engine.generate(asked, SamplingParams(n=2, max_tokens=12, temperature=temperature))
    for prompt, group in zip(asked, groups, strict=True):
        assert len(group) == 2
        for sample in group:
            assert sample.prompt_ids.tolist() == prompt
            assert len(sample.completion_ids) == 12
            assert sample.finish_reason is FinishReason.LENGTH
            assert_sampled_from(tiny_model(family), sample, temperature or 1.0)


def test_routes_that_are_not_asked_for_are_not_sent(engine: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    receiver = engine._routes._receiver
    if receiver is not None:
        arrive = receiver._deliver
        monkeypatch.setattr(receiver, "_deliver", lambda ended: (sent.extend(one[0] for one in ended), arrive(ended)))
    params = SamplingParams(n=1, max_tokens=6, temperature=0.0)
    ((without,),) = engine.generate([[1, 2, 3]], replace(params, routes=False))
    engine.prompt_logprobs([1, 2, 3])
    ((sample,),) = engine.generate([[1, 2, 3]], params)
    assert is_unrouted(without.trace)
    assert without.trace.token_ids.tolist() == sample.trace.token_ids.tolist()
    assert_sampled_from(tiny_model(family), sample)
    assert len(sent) == (0 if receiver is None else 1)


def test_log_probs_of_a_truncated_distribution(engine: Any, family: str) -> None:
    params = SamplingParams(n=4, max_tokens=6, temperature=1.3, top_k=5, top_p=0.8)
    (group,) = engine.generate([[1, 2, 3]], params)
    for sample in group:
        untruncated = reference(tiny_model(family), sample.trace.token_ids, 1.3).logprobs[2:]
        assert (sample.logprobs >= untruncated - 1e-4).all()
        assert (sample.logprobs > untruncated + 1e-3).any()


def test_seeds_and_stop_tokens(vllm_engine: Callable[[str], Any]) -> None:
    engine, family = vllm_engine("mixtral"), "mixtral"
    params = SamplingParams(n=3, max_tokens=10, seed=5)
    (first,), (again,) = engine.generate([[4, 5, 6]], params), engine.generate([[4, 5, 6]], params)
    completions = [sample.completion_ids.tolist() for sample in first]
    assert completions == [sample.completion_ids.tolist() for sample in again]
    assert len({tuple(ids) for ids in completions}) == 3

    stop = completions[0][4]
    stopping = SamplingParams(n=3, max_tokens=10, seed=5, stop_token_ids=(stop,))
    ended = engine.generate([[4, 5, 6]], stopping)[0][0]
    assert ended.finish_reason is FinishReason.STOP
    assert ended.completion_ids.tolist() == completions[0][: completions[0].index(stop) + 1]
    assert_sampled_from(tiny_model(family), ended)


def test_a_seed_that_would_kill_vllm_on_cpu_is_refused(qwen: Any) -> None:
    with pytest.raises(EngineError, match="enable_chunked_prefill=False"):
        qwen.generate([[1]], SamplingParams(seed=1))
    assert qwen.generate([[1]], SamplingParams(seed=1, temperature=0))


@pytest.mark.parametrize("ids", [[-1], [VOCABULARY], [1, 2**31]], ids=str)
def test_a_token_that_the_model_does_not_have_is_refused_and_kills_nothing(qwen: Any, ids: list[int]) -> None:
    for ask in (lambda: qwen.generate([ids], SamplingParams()), lambda: qwen.prompt_logprobs([1, *ids])):
        with pytest.raises(EngineError, match="not in the model's vocabulary"):
            ask()
    with pytest.raises(EngineError, match="a stop token is not in the model's vocabulary"):
        qwen.generate([[1]], SamplingParams(stop_token_ids=tuple(ids)))
    assert qwen.healthy()
    assert len(qwen.generate([[1, 2]], SamplingParams(max_tokens=2))) == 1


def test_a_prefix_from_the_cache_has_its_routes(qwen: Any) -> None:
    shared = np.random.default_rng(1).integers(1, VOCABULARY, 100).tolist()
    qwen.generate([shared], SamplingParams(max_tokens=1))
    before = counter("prefix_cache_hits")
    groups = qwen.generate([[*shared, token] for token in range(1, 5)], SamplingParams(n=2, max_tokens=5))
    assert counter("prefix_cache_hits") - before >= 4 * 96
    for group in groups:
        for sample in group:
            assert_sampled_from(tiny_model("qwen3_moe"), sample)


def test_a_prompt_that_is_prefilled_in_chunks_has_its_routes(qwen: Any) -> None:
    asked = [np.random.default_rng(seed).integers(1, VOCABULARY, 200).tolist() for seed in (21, 22, 23)]  # 64 at once
    for (sample,) in qwen.generate(asked, SamplingParams(max_tokens=4)):
        assert_sampled_from(tiny_model("qwen3_moe"), sample)


def test_a_sequence_that_was_preempted_has_its_routes(qwen: Any) -> None:
    before = counter("num_preemptions")
    groups = qwen.generate(prompts(12, longest=20, seed=3), SamplingParams(max_tokens=150))
    assert counter("num_preemptions") > before
    for (sample,) in groups:
        assert len(sample.completion_ids) == 150
        assert_sampled_from(tiny_model("qwen3_moe"), sample)


def test_a_sequence_ends_where_the_engine_ends(qwen: Any) -> None:
    ((sample,),) = qwen.generate([[7] * 250], SamplingParams(max_tokens=100))
    assert (len(sample.trace), sample.finish_reason) == (256, FinishReason.LENGTH)
    with pytest.raises(EngineError, match="rejected a request"):
        qwen.generate([[1], [7] * 256], SamplingParams())


def test_log_probs_of_a_prompt(engine: Any, family: str) -> None:
    expected = reference(tiny_model(family), np.array(PROBE)).logprobs
    np.testing.assert_allclose(engine.prompt_logprobs(PROBE), expected, atol=2e-4)


def test_prompts_one_by_one_from_a_running_loop(qwen: Any) -> None:
    params = SamplingParams(max_tokens=4)

    async def both() -> list[list[Sample]]:
        return await asyncio.gather(*(qwen.generate_one(prompt, params) for prompt in ([1, 2], [3, 4, 5])))

    for (sample,) in asyncio.run(both()):
        assert_sampled_from(tiny_model("qwen3_moe"), sample)


# ---- weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["iterator", "folder"])
def test_after_an_update_routes_are_those_of_the_new_weights(
    vllm_engine: Callable[[str], Any], family: str, form: str, tmp_path: Path
) -> None:
    engine, old, new = vllm_engine(family), tiny_model(family), tiny_model(family, seed=1)
    prompt = np.random.default_rng(1).integers(1, VOCABULARY, 100).tolist()  # cached where prefixes are
    engine.generate([prompt], SamplingParams(max_tokens=2))
    new.save_pretrained(tmp_path)
    engine.update_weights(checkpoint_tensors(new) if form == "iterator" else tmp_path, version=3, probe=probe(new))
    (group,) = engine.generate([prompt], SamplingParams(n=2, max_tokens=8))
    for sample in group:
        assert sample.weight_version == engine.weight_version == 3
        assert [span.version for span in sample.trace.versions] == [3]
        assert_sampled_from(new, sample)
    engine.update_weights(checkpoint_tensors(old), version=0, probe=probe(old))
    assert_sampled_from(old, engine.generate([prompt], SamplingParams(max_tokens=8))[0][0])


def test_weights_come_in_many_chunks(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_replay.engines.vllm.engine.CHUNK_BYTES", 20_000)
    new = tiny_model("qwen3_moe", seed=2)
    shuffled = list(checkpoint_tensors(new))
    np.random.default_rng(0).shuffle(shuffled)  # type: ignore[arg-type]
    qwen.update_weights(iter(shuffled), version=2, probe=probe(new))
    assert_sampled_from(new, qwen.generate([[5, 6, 7]], SamplingParams(max_tokens=8))[0][0])


def test_an_update_that_fails_leaves_an_engine_that_refuses(qwen: Any) -> None:
    new = tiny_model("qwen3_moe", seed=1)
    everything = list(checkpoint_tensors(new))
    one_expert = [(name, tensor) for name, tensor in everything if "layers.2.mlp.experts.5.up_proj" not in name]
    for wrong, text in (
        (everything[:-1], "missing"),
        (one_expert, "layers.2.mlp.experts"),
        ([("model.nothing", everything[0][1])], "nothing"),
        ([(everything[0][0], everything[0][1][:1])], "could not update"),
    ):
        with pytest.raises(EngineError, match=text):
            qwen.update_weights(iter(wrong), version=1)
        with pytest.raises(EngineError, match="did not succeed"):
            qwen.generate([[1]], SamplingParams())
        assert qwen.weight_version == 0
    qwen.update_weights(iter(everything), version=1, probe=probe(new))
    assert_sampled_from(new, qwen.generate([[5, 6, 7]], SamplingParams(max_tokens=8))[0][0])


def test_a_probe_finds_wrong_weights(qwen: Any) -> None:
    with pytest.raises(EngineError, match="does not compute with the weights"):
        qwen.update_weights(
            checkpoint_tensors(tiny_model("qwen3_moe", seed=1)), version=1, probe=probe(tiny_model("qwen3_moe"))
        )
    with pytest.raises(EngineError, match="did not succeed"):
        qwen.generate([[1]], SamplingParams())


def test_an_iterator_that_breaks_off_fails_the_update(qwen: Any) -> None:
    def breaks() -> Iterator[tuple[str, Any]]:
        yield from list(checkpoint_tensors(tiny_model("qwen3_moe", seed=1)))[:5]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError):
        qwen.update_weights(breaks(), version=1)
    with pytest.raises(EngineError, match="did not succeed"):
        qwen.generate([[1]], SamplingParams())


# ---- life --------------------------------------------------------------------------------------------------------


def sample_in_background(engine: Any, params: SamplingParams) -> tuple[threading.Thread, list[list[Sample]]]:
    """Long samples that have all begun when this returns: a short one that came later has ended."""
    samples: list[list[Sample]] = []
    thread = threading.Thread(target=lambda: samples.extend(engine.generate([[1, 2], [3] * 9], params)))
    thread.start()
    while not engine._barrier.active and thread.is_alive():
        pass
    engine.generate([[4]], SamplingParams(max_tokens=10))
    return thread, samples


ATTEMPTS = 20  # to abort samples before they end: a busy machine may stall this process until they have


def all_aborted(groups: list[list[Sample]]) -> bool:
    return all(sample.finish_reason is FinishReason.ABORT for group in groups for sample in group)


def test_aborted_samples_are_whole_as_far_as_they_went(qwen: Any) -> None:
    for _ in range(ATTEMPTS):
        thread, groups = sample_in_background(qwen, SamplingParams(n=2, max_tokens=240))
        qwen.abort()
        thread.join()
        if all_aborted(groups):
            break
    assert [len(group) for group in groups] == [2, 2]
    for group in groups:
        for sample in group:
            assert sample.finish_reason is FinishReason.ABORT
            assert 0 < len(sample.completion_ids) < 240
            assert_sampled_from(tiny_model("qwen3_moe"), sample)


def test_an_update_aborts_what_is_under_way_and_mixes_no_versions(qwen: Any) -> None:
    old, new = tiny_model("qwen3_moe"), tiny_model("qwen3_moe", seed=1)
    for version in range(ATTEMPTS):
        thread, groups = sample_in_background(qwen, SamplingParams(max_tokens=240))
        qwen.update_weights(checkpoint_tensors(new), version=version + 1, probe=probe(new))
        thread.join()
        assert [len(group) for group in groups] == [1, 1]
        for (sample,) in groups:
            assert sample.weight_version == version
            assert_sampled_from(old, sample)
        if all_aborted(groups):
            break
        old, new = new, old
    assert all_aborted(groups)


def test_requests_that_come_during_an_update_get_the_new_weights(qwen: Any) -> None:
    new = tiny_model("qwen3_moe", seed=1)
    results: list[list[Sample]] = []
    thread = threading.Thread(target=lambda: results.extend(qwen.generate([[1, 2, 3]], SamplingParams(max_tokens=5))))

    def weights() -> Iterator[tuple[str, Any]]:
        thread.start()
        yield from checkpoint_tensors(new)

    qwen.update_weights(weights(), version=1)
    thread.join()
    assert results[0][0].weight_version == 1
    assert_sampled_from(new, results[0][0])


def test_a_sleeping_engine_refuses_until_it_wakes(qwen: Any) -> None:
    qwen.sleep()
    with pytest.raises(EngineError, match="is asleep"):
        qwen.generate([[1]], SamplingParams())
    qwen.wake()
    assert_sampled_from(tiny_model("qwen3_moe"), qwen.generate([[1, 2]], SamplingParams(max_tokens=5))[0][0])


def test_an_engine_that_dropped_its_weights_samples_after_an_update_only(qwen: Any) -> None:
    new = tiny_model("qwen3_moe", seed=5)
    qwen.sleep(level=2)
    with pytest.raises(EngineError, match="is asleep"):
        qwen.update_weights(checkpoint_tensors(new), version=1)
    qwen.wake_for_update()
    with pytest.raises(EngineError, match="Repeat update_weights"):
        qwen.generate([[1, 2]], SamplingParams(max_tokens=5))
    qwen.update_weights(checkpoint_tensors(new), version=1, probe=probe(new))
    assert_sampled_from(new, qwen.generate([[1, 2]], SamplingParams(max_tokens=5))[0][0])


def test_the_topology_is_that_of_the_model(engine: Any, family: str) -> None:
    assert engine.topology == mr.MoeTopology.from_config(tiny_model(family).config)
    assert engine.name.name == "vLLM"


# ---- in use ---------------------------------------------------------------------------------------------------------


def test_behind_the_server(vllm_engine: Callable[[str], Any]) -> None:
    from moe_replay.engines.server.app import build_app

    engine, old, new = vllm_engine("qwen3_moe"), tiny_model("qwen3_moe"), tiny_model("qwen3_moe", seed=1)
    with serving(build_app(engine, TOKEN)) as address, RolloutClient(address, token=TOKEN) as client:
        assert client.name.name == "vLLM"
        asked = [[1, 2, 3], list(range(1, 80))]
        for version, model in ((1, new), (0, old)):
            client.update_weights(checkpoint_tensors(model), version, probe(model), weights_id=f"run-{version}")
            for group in client.generate(asked, SamplingParams(n=3, max_tokens=6, temperature=0.8)):
                for sample in group:
                    assert (sample.weight_version, sample.weights_id) == (version, f"run-{version}")
                    assert_sampled_from(model, sample, 0.8)
        engine.update_weights(checkpoint_tensors(old), 0, probe(old), weights_id="other-0")  # by someone else
        with pytest.raises(EngineUnavailableError, match=r"not sent.*run-0.*other-0"):
            client.generate(asked, SamplingParams(max_tokens=2))


def test_replay_repairs_what_routing_breaks(vllm_engine: Callable[[str], Any]) -> None:
    engine, model = vllm_engine("olmoe"), tiny_model("olmoe")
    prompts = np.random.default_rng(0).integers(1, VOCABULARY, (8, 12)).tolist()
    groups = engine.generate(prompts, SamplingParams(max_tokens=32, temperature=0.8))
    samples = [sample for group in groups for sample in group]

    same = attribute(model, samples, temperature=0.8)
    assert failures(same) == []
    assert same.alignment.status == "aligned"
    assert same.passes[R3].mismatch["k3_kl"] < 1e-8

    replay = mr.attach(model)
    perturb_routers(replay, scale=0.02)
    moved = attribute(model, samples, replay=replay, temperature=0.8)
    assert moved.routing.overall < same.routing.overall
    assert moved.passes[NATIVE].mismatch["k3_kl"] > 30 * moved.passes[R3].mismatch["k3_kl"]


# ---- what cannot be started --------------------------------------------------------------------------------------


@pytest.fixture
def start() -> Callable[..., Any]:
    pytest.importorskip("vllm", reason=NEEDS_VLLM)
    from moe_replay.engines.vllm.engine import VllmEngine

    return VllmEngine


def test_options_that_are_ours(start: Callable[..., Any]) -> None:
    with pytest.raises(EngineError, match="enable_return_routed_experts"):
        start("model", enable_return_routed_experts=False)
    with pytest.raises(EngineError, match="does not have these options: found nonsense"):
        start("model", nonsense=1)


def test_bfloat16_on_a_cpu_without_it(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_replay.engines.vllm.arguments.cpu_has_bfloat16", lambda: False)
    with pytest.raises(EngineError, match="this CPU does not compute in bfloat16"):
        start("model", dtype="bfloat16")


def test_a_version_that_has_no_routes(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.engine.arg_utils.AsyncEngineArgs", make_dataclass("Args", ["model"]))
    with pytest.raises(EngineError, match=r"cannot return routes.*found 0\.3"):
        start("model")


@pytest.mark.whole_runs
def test_a_setting_that_vllm_refuses_with_routes(start: Callable[..., Any], tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="did not start with routes"):
        start(tmp_path, dtype="float32", pipeline_parallel_size=2, max_model_len=64)
