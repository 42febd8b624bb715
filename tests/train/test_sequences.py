"""Sequences of several turns: none waits for another, evaluation plays the environment, weights change in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from moe_replay.engines.requests import per_prompt
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.errors import AlignmentError
from moe_replay.records import SamplingParams
from moe_replay.train.loop import train
from moe_replay.train.rollout.environments import EpisodeError
from moe_replay.train.rollout.groups import GroupTask, LocalGroups
from moe_replay.train.rollout.prompts import Prompt, PromptStream
from moe_replay.train.rollout.rewards import load_reward
from moe_replay.train.rollout.rollouts import Rollouts
from moe_replay.train.setup.sources import load_tokenizer

Config = Callable[..., Any]
Metrics = Callable[[Path], list[dict[str, Any]]]
GIVE_UP_S = 120


class Held(TransformersEngine):
    """Answers the first turn of the last sample only when another sample has begun its second one."""

    is_serial = False

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.seeds: list[int | None] = []
        self._second_turn = asyncio.Event()

    async def generate_one(self, prompt: Any, params: SamplingParams) -> Any:
        if len(prompt) > 3:
            self._second_turn.set()
        else:
            self.seeds.append(params.seed)
            if len(self.seeds) == 3:
                await asyncio.wait_for(self._second_turn.wait(), GIVE_UP_S)
        return await super().generate_one(prompt, params)


def test_a_second_turn_begins_when_its_own_first_turn_has_ended(config: Config, demo_files: Any) -> None:
    made = config(
        reward={"workers": 0},
        rollout={"environment": "tests.train.test_loop:calculator", "max_turns": 2, "max_tokens": 3},
    )
    engine = Held.from_pretrained(demo_files.model)
    sampler = LocalGroups(made, engine, load_tokenizer(str(demo_files.model)), [], max_length=32)
    params = SamplingParams(n=3, max_tokens=3, seed=7)
    prompt = Prompt(0, "", (5, 6, 7), {})
    try:
        (turns,) = sampler.first_turns([prompt], [params], together=True)
        sampled = sampler.start(sampler.sample(prompt, params, turns))
        assert sampler.wait(sampled)
        sequences = sampled.result()
    finally:
        sampler.close()
        engine.close()
    assert len(sequences) == 3
    assert len(set(engine.seeds)) == 3  # otherwise all samples would be the same
    for sequence in sequences:
        observed = (~sequence.sampled[3:]).sum()
        assert observed > 0
        assert sequence.sampled[-1]


async def blocking(episode: Any) -> None:
    """Blocks its event loop until a sample of another prompt has begun."""
    if episode.prompt.row == 0:
        assert other_prompt.wait(GIVE_UP_S)


other_prompt = threading.Event()


class Reported(TransformersEngine):
    """Says when the second prompt is sampled, which begins only when the first has been."""

    is_serial = False
    first_prompt = False

    async def generate_one(self, prompt: Any, params: SamplingParams) -> Any:
        while prompt[0] == 6 and not self.first_prompt:
            await asyncio.sleep(0.01)
        if prompt[0] == 6:
            await asyncio.sleep(0.1)  # the environment of the other one blocks meanwhile
            other_prompt.set()
        samples = await super().generate_one(prompt, params)
        self.first_prompt = True
        return samples


def test_an_environment_that_blocks_does_not_hold_up_sampling(config: Config, demo_files: Any) -> None:
    made = config(
        reward={"workers": 0}, rollout={"environment": "tests.train.test_sequences:blocking", "max_tokens": 3}
    )
    engine = Reported.from_pretrained(demo_files.model)
    sampler = LocalGroups(made, engine, load_tokenizer(str(demo_files.model)), [], max_length=32)
    params = SamplingParams(n=1, max_tokens=3, seed=7)
    prompts = [Prompt(row, "", (5 + row, 6, 7), {}) for row in range(2)]
    try:
        turns = sampler.first_turns(prompts, [params] * 2, together=True)
        running = [sampler.start(sampler.sample(*both)) for both in zip(prompts, [params] * 2, turns, strict=True)]
        for one in running:
            assert sampler.wait(one)
            assert len(one.result()) == 1
    finally:
        sampler.close()
        engine.close()


async def failing_beside(episode: Any) -> None:
    """Raises in one episode while another one waits for what does not come."""
    if not waiting.acquire(blocking=False):
        raise ValueError("this one fails")
    try:
        await asyncio.sleep(GIVE_UP_S)
    except asyncio.CancelledError:
        cancelled.set()
        raise


waiting, cancelled = threading.Lock(), threading.Event()


def test_the_other_episodes_of_a_group_end_with_one_that_fails(config: Config, demo_files: Any) -> None:
    environment = "tests.train.test_sequences:failing_beside"
    made = config(reward={"workers": 0}, rollout={"environment": environment, "max_tokens": 3})
    with ExitStack() as stack:
        engine = TransformersEngine.from_pretrained(demo_files.model)
        stack.callback(engine.close)
        sampler = LocalGroups(made, engine, load_tokenizer(str(demo_files.model)), [], max_length=32)
        stack.callback(sampler.close)
        params = SamplingParams(n=2, max_tokens=3, seed=7)
        task = GroupTask(prompt=Prompt(0, "", (5, 6, 7), {}), index=0, params=params)
        (running,) = sampler.submit([task], together=True)
        with pytest.raises(EpisodeError, match="this one fails"):
            running.group.result()
        assert cancelled.wait(GIVE_UP_S / 4)


class Ordered(TransformersEngine):
    """Samples the first prompt only when another has been scored; nothing may ask for all of them in one call."""

    is_serial = False

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.seeds: list[int | None] = []

    def generate(self, prompts: Any, params: SamplingParams) -> Any:
        assert len(prompts) == 1
        return super().generate(prompts, params)

    async def generate_one(self, prompt: Any, params: SamplingParams) -> Any:
        self.seeds.append(params.seed)
        if len(self.seeds) == 1:
            assert await asyncio.to_thread(a_group_is_scored.wait, GIVE_UP_S)
        return await super().generate_one(prompt, params)


a_group_is_scored = threading.Event()


def reporting(completions: list[str], **_: Any) -> list[float]:
    """Says that it was called."""
    a_group_is_scored.set()
    return [float(place) for place in range(len(completions))]


def test_a_group_is_scored_while_others_are_sampled_also_at_staleness_0(
    config: Config, metrics_of: Metrics, demo_files: Any
) -> None:
    engine = Ordered.from_pretrained(demo_files.model)
    try:
        folder = train(config(steps=1, reward={"functions": ["tests.train.test_sequences:reporting"]}), engine)
    finally:
        engine.close()
    (line,) = metrics_of(folder)
    assert line["completion/staleness_max"] == 0
    assert len(engine.seeds) == 4
    assert len(set(engine.seeds)) == 4


class Concurrent(TransformersEngine):
    """Takes each prompt in a separate call."""

    is_serial = False


scored: list[str] = []


def keeping(completions: list[str], **_: Any) -> list[float]:
    """Keeps what it scores."""
    scored.extend(completions)
    return [0.0] * len(completions)


@pytest.mark.parametrize("kind", [TransformersEngine, Concurrent])
def test_equal_prompts_of_a_step_and_of_an_evaluation_have_different_samples(
    kind: type[TransformersEngine], config: Config, demo_files: Any
) -> None:
    reward = "tests.train.test_sequences:keeping"
    made = config(rollout={"num_generations": 2}, reward={"functions": [reward]}, log={"completions": True})
    tokenizer = load_tokenizer(str(demo_files.model))
    prompts = [Prompt(row, "", (5, 6, 7), {}) for row in range(3)]
    engine: Any = kind.from_pretrained(demo_files.model)
    rollouts = Rollouts(made, engine, PromptStream(prompts), tokenizer, [load_reward(reward)], 32)
    try:
        batch = rollouts.next_batch(0)
        assert batch is not None
        groups: dict[int, list[str]] = {}
        for one in batch.completions:
            groups.setdefault(one.group, []).append(one.completion)
        assert len(groups) == 4
        assert len({tuple(texts) for texts in groups.values()}) == 4
        scored.clear()
        assert rollouts.evaluation(prompts, 1.0).metrics(None)
        assert len(set(scored)) == 3
    finally:
        rollouts.close()
        engine.close()


class Serial(TransformersEngine):
    """Notes the seed of each prompt, by call."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.calls: list[list[int | None]] = []

    def generate(self, prompts: Any, params: SamplingParams) -> Any:
        self.calls.append([own.seed for own in per_prompt(params, len(prompts))])
        return super().generate(prompts, params)


class SeparateCalls(Serial):
    """Takes each prompt in a separate call."""

    is_serial = False


def batches_from(engine: Any, made: Any, state: Any, count: int, prompts: list[Prompt]) -> tuple[Any, list[Any]]:
    """Return the state after the first batch, and the completions of each batch."""
    tokenizer, reward = load_tokenizer(made.model.path), load_reward("tests.train.test_sequences:keeping")
    rollouts = Rollouts(made, engine, PromptStream(prompts), tokenizer, [reward], 32)
    if state is not None:
        rollouts.restore(state)
    states, texts = [], []
    try:
        for _ in range(count):
            batch = rollouts.next_batch(0)
            assert batch is not None
            texts.append([one.completion for one in batch.completions])
            states.append(rollouts.state)
    finally:
        rollouts.close()
    return states[0], texts


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("kind", [Serial, SeparateCalls])
def test_each_group_of_a_run_has_its_own_seed_whatever_the_engine_and_after_a_resume(
    kind: type[Serial], max_staleness: int, config: Config, demo_files: Any
) -> None:
    reward = {"functions": ["tests.train.test_sequences:keeping"]}
    sampled = {"num_generations": 2, "max_staleness": max_staleness}
    made = config(rollout=sampled, reward=reward, log={"completions": True})
    prompts = [Prompt(row, "", (5 + row % 2, 6, 7), {}) for row in range(4)]  # each of two prompts twice a step
    in_step = config(rollout={**sampled, "max_staleness": 0}, reward=reward, log={"completions": True})
    _, expected = batches_from(Serial.from_pretrained(demo_files.model), in_step, None, 2, prompts)
    engine = kind.from_pretrained(demo_files.model)
    state, texts = batches_from(engine, made, None, 2, prompts)
    seeds = [seed for call in engine.calls for seed in call]
    assert len(set(seeds)) == len(seeds) >= 8
    assert None not in seeds
    if kind is Serial and max_staleness == 0:
        assert [len(call) for call in engine.calls] == [4, 4]  # one call a step
    assert texts == expected
    resumed = kind.from_pretrained(demo_files.model)
    _, again = batches_from(resumed, made, state, 1, prompts)
    assert again == texts[1:]
    assert {seed for call in resumed.calls for seed in call} >= set(seeds[4:8])


@pytest.mark.parametrize(
    ("reproducible", "device", "has_seeds"),
    [("auto", "cpu", True), ("auto", "cuda", False), (True, "cuda", True), (False, "cpu", False)],
)
def test_requests_have_seeds_on_a_cpu_unless_set_otherwise(
    reproducible: Any, device: str, has_seeds: bool, config: Config, demo_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_replay.train.rollout.rollouts.device_type", lambda requested: device)
    reward = {"functions": ["tests.train.test_sequences:keeping"]}
    made = config(rollout={"num_generations": 2, "reproducible": reproducible}, reward=reward)
    engine = Serial.from_pretrained(demo_files.model)
    batches_from(engine, made, None, 1, [Prompt(row, "", (5, 6, 7), {}) for row in range(2)])
    seeds = [seed for call in engine.calls for seed in call]
    assert seeds
    assert {seed is not None for seed in seeds} == {has_seeds}


def says_twelve(prompts: list, completions: list[str], **_: Any) -> list[float]:
    """Whether the environment has spoken."""
    return [float("12" in text) for text in completions]


def test_evaluation_plays_the_environment(config: Config, metrics_of: Metrics, demo_files: Any) -> None:
    made = config(
        steps=1,
        data={"eval_path": str(demo_files.eval)},
        rollout={"environment": "tests.train.test_loop:calculator", "max_turns": 2, "max_tokens": 3},
        reward={"functions": ["tests.train.test_sequences:says_twelve"]},
        eval={"every": 1, "prompts": 6},
    )
    (line,) = metrics_of(train(made))
    assert line["eval/reward"] == 1.0


@pytest.mark.parametrize(("sampled_by", "max_staleness"), [(3, 0), (1, 0), (3, 1), (0, 1)])
def test_samples_of_newer_weights_than_the_trainer_has_or_of_too_old_ones_are_refused(
    sampled_by: int, max_staleness: int, config: Config, demo_files: Any
) -> None:
    made = config(rollout={"max_staleness": max_staleness, "reproducible": False})
    tokenizer = load_tokenizer(str(demo_files.model))
    engine: Any = TransformersEngine.from_pretrained(demo_files.model, weight_version=sampled_by)
    prompts = [Prompt(row, "", (5, 6, 7), {"solution": "1"}) for row in range(3)]
    rewards = [load_reward(name) for name in made.reward.functions]
    rollouts = Rollouts(made, engine, PromptStream(prompts), tokenizer, rewards, 32)
    expected = rf"\[sample 0\].*version 2, at most {max_staleness} steps older.*found version {sampled_by} "
    try:
        with pytest.raises(AlignmentError, match=expected):
            rollouts.next_batch(2)
        batch = rollouts.next_batch(sampled_by)
        assert batch is not None
        assert batch.metrics["completion/staleness_max"] == 0
    finally:
        rollouts.close()
        engine.close()


class Watched(TransformersEngine):
    """Holds the groups of each step but the first until the weights are about to change, and counts those running."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.calls = self.running = self.syncs = 0
        self.running_at_updates: list[int] = []

    async def generate_one(self, prompt: Any, params: SamplingParams) -> Any:
        step = self.calls // 4
        self.calls += 1
        self.running += 1
        while self.syncs < step:
            await asyncio.sleep(0.01)
        samples = await super().generate_one(prompt, params)
        self.running -= 1
        return samples

    def update_weights(self, weights: Any, version: int, probe: Any = None, weights_id: str = "") -> None:
        self.running_at_updates.append(self.running)
        self.syncs = version
        super().update_weights(weights, version, probe, weights_id)


def test_running_samples_may_finish_before_the_weights_change(
    config: Config, demo_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import moe_replay as mr

    made = config(
        steps=3,
        rollout={"max_staleness": 1, "partial_rollout": False, "reproducible": False},
        log={"traces": 100},
    )
    engine = Watched.from_pretrained(demo_files.model)
    wait_for_samples = Rollouts.finish_running

    def finish_running(rollouts: Rollouts) -> None:
        engine.syncs += 1
        wait_for_samples(rollouts)

    monkeypatch.setattr(Rollouts, "finish_running", finish_running)
    try:
        folder = train(made, engine)
    finally:
        engine.close()
    assert engine.running_at_updates == [0] * 4
    for path in (folder / "traces").iterdir():
        with mr.TraceFile(path) as file:
            for trace in file:
                assert len(set(trace.token_versions[trace.valid.any(axis=1)].tolist())) == 1
