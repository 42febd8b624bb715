"""The real vLLM on a GPU with CUDA graphs: our capture, vLLM's own and the routers of Transformers agree.

One engine for each family and dtype; `-k deepseek_v3-bfloat16` runs the tests of one of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from moe_replay.engines.session import Session
from moe_replay.errors import EngineError
from moe_replay.records import FinishReason, SamplingParams
from moe_replay.weights.checkpoint import checkpoint_tensors
from tests.gpu.engines import BLOCK, FEW_SLOTS, NEEDS_GPU, ON_CPU, Case, random_prompts, score, started
from tests.gpu.models import FAMILIES

pytestmark = NEEDS_GPU

ATTEMPTS = 20  # to abort a turn before it ends: a busy machine may stall this process until it has
# MLA has no kernels in float32, gpt-oss is served in bfloat16 only.
CASES = [(family, "bfloat16") for family in FAMILIES] + [
    (family, "float32") for family in ("qwen3_moe", "mixtral", "glm4_moe")
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    family, dtype = request.param
    options: dict[str, Any] = {}
    if dtype == "float32":
        # Exact enough for tokens that are computed again after a preemption to choose as Transformers does. vLLM's own
        # capture has the routes of the first computation, ours of the last: see test_vllm_computed_again.
        options = {"num_gpu_blocks_override": FEW_SLOTS // BLOCK, "block_size": BLOCK, "capture": "kv_slot"}
    if (family, dtype) == ("qwen3_moe", "bfloat16"):
        options = {"enable_sleep_mode": not ON_CPU}
    with started(family, dtype, tmp_path_factory.mktemp("model"), **options) as started_case:
        yield started_case


def test_several_samples_of_prompts_with_a_common_prefix(case: Case) -> None:
    prompts = random_prompts(12, 60, shared=40)
    case.sampled(prompts[:1], SamplingParams(max_tokens=1))  # the cache holds the prefix
    samples = case.sampled(prompts, SamplingParams(n=2, max_tokens=48, ignore_eos=True))
    assert [len(sample.completion_ids) for sample in samples] == [48] * 24
    case.assert_sampled_from(case.model, samples)
    assert case.compare(samples, case.load(seed=1)).agreement < 0.7  # the measure can fail


def test_a_prompt_that_is_prefilled_in_chunks(case: Case) -> None:
    prompts = [[*prompt, *([7] * (300 - len(prompt)))] for prompt in random_prompts(3, 250, seed=1)]
    case.assert_sampled_from(case.model, case.sampled(prompts, SamplingParams(max_tokens=8, ignore_eos=True)))


def test_a_stop_token_ends_a_sample(case: Case) -> None:
    prompts = random_prompts(1, 30, seed=2)
    (whole,) = case.sampled(prompts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    completion = whole.completion_ids.tolist()
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop_token_ids=(completion[5],))
    (ended,) = case.sampled(prompts, params)
    assert ended.finish_reason is FinishReason.STOP
    assert ended.completion_ids.tolist() == completion[: completion.index(completion[5]) + 1]
    assert len(ended.trace) == len(prompts[0]) + len(ended.completion_ids)


def test_sequences_that_are_preempted(case: Case) -> None:
    if not case.preempts:
        pytest.skip("tokens that are computed again may be routed otherwise in this dtype")
    case.profile(on=True)
    samples = case.sampled(random_prompts(12, 60, seed=3), SamplingParams(max_tokens=150, ignore_eos=True))
    assert case.profile(on=False)["preempted"] > 0
    assert {len(sample.completion_ids) for sample in samples} == {150}
    case.assert_sampled_from(case.model, samples)


def test_a_turn_that_is_aborted_and_resumed(case: Case) -> None:
    params = SamplingParams(max_tokens=450, ignore_eos=True)
    for _ in range(ATTEMPTS):
        session = Session(random_prompts(1, 30, seed=4)[0])
        turn = session.generate(case.engine, params)
        thread = threading.Thread(target=asyncio.run, args=(turn,))
        thread.start()
        while not case.engine._barrier.active and thread.is_alive():
            pass
        case.sampled([[4, 5]], SamplingParams(max_tokens=10, ignore_eos=True))  # came later: the turn has begun
        case.engine.abort()
        thread.join()
        if session.finish_reason is FinishReason.ABORT:
            break
    assert session.finish_reason is FinishReason.ABORT
    aborted_at = len(session)
    asyncio.run(session.generate(case.engine, SamplingParams(max_tokens=460, ignore_eos=True)))
    assert session.finish_reason is FinishReason.LENGTH
    assert len(session) > aborted_at
    sequence = session.finish()
    assert sequence.trace.valid[:-1].all()
    own, logprobs = score(case.model, sequence.token_ids)
    assert (abs(sequence.logprobs[1:] - logprobs)[sequence.versions[1:] >= 0] < 1).mean() > 0.9
    assert own.layers == sequence.trace.layers


def test_sleep_and_wake(case: Case) -> None:
    if not case.sleeps:
        pytest.skip("not started with sleep mode")
    prompts, params = random_prompts(6, 60, seed=5), SamplingParams(max_tokens=16, ignore_eos=True)
    case.engine.sleep()
    with pytest.raises(EngineError, match="is asleep"):
        case.sampled(prompts, params)
    case.engine.wake()
    case.assert_sampled_from(case.model, case.sampled(prompts, params))
    case.engine.sleep(level=2)
    case.engine.wake_for_update()
    update(case, case.model, version=0)
    case.assert_sampled_from(case.model, case.sampled(prompts, params))


def test_routes_follow_an_update_that_the_probe_confirms(case: Case) -> None:
    new = case.load(seed=1)
    with pytest.raises(EngineError, match="does not compute with the weights"):
        update(case, new, version=1, probed=case.model)
    with pytest.raises(EngineError, match="did not succeed"):
        case.sampled([[3, 4]], SamplingParams(max_tokens=1))
    update(case, new, version=1)
    case.model = new
    samples = case.sampled(random_prompts(12, 60, seed=6), SamplingParams(max_tokens=24, ignore_eos=True))
    assert {sample.weight_version for sample in samples} == {1}
    case.assert_sampled_from(new, samples)


def update(case: Case, model: Any, version: int, probed: Any = None) -> None:
    """Send the weights of a model, with the probe of the same one if not told otherwise."""
    weights = ((name, tensor.cpu()) for name, tensor in checkpoint_tensors(model))
    case.engine.update_weights(weights, version, case.probe(model if probed is None else probed))
