"""Environments that rewrite their history: each part is a sample with its own routes, an episode counts once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from moe_replay.engines.session import Session
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.records import FinishReason, SamplingParams, Trajectory
from moe_replay.train.learn.batches import mini_batches
from moe_replay.train.loop import train
from moe_replay.train.rollout.advantages import std_normalized, turn_factors
from moe_replay.train.rollout.environments import Episode, EpisodeError
from moe_replay.train.rollout.groups import check_versions
from moe_replay.train.rollout.prompts import Prompt, PromptStream
from moe_replay.train.rollout.rewards import load_reward
from moe_replay.train.rollout.rollouts import Rollouts
from moe_replay.train.run import Job
from moe_replay.train.setup.sources import load_tokenizer
from tests.combinations import with_whole_runs
from tests.train.test_batches import Rank
from tests.train.trajectories import random_trajectory, stored

Config = Callable[..., Any]
Metrics = Callable[[Path], list[dict[str, Any]]]
HERE = "tests.train.test_rewriting"
OBSERVED = "7+1="


def with_seed_of_turn(episode: Any) -> None:
    """Seed the next turn by its number alone, however the turns before it are divided into samples."""
    episode.params = replace(episode.params, seed=1000 * episode.prompt.row + episode.turns)


async def appending(episode: Any) -> None:
    """Three turns of one sequence; those of a group differ by their first turn."""
    while episode.can_continue:
        episode.observe(OBSERVED)
        with_seed_of_turn(episode)
        await episode.generate()


async def repeating(episode: Any) -> None:
    """The same turns as samples: each prompt is the whole history, and begins another sample nevertheless."""
    while episode.can_continue:
        observed = episode.tokenizer(OBSERVED, add_special_tokens=False)["input_ids"]
        episode.begin_sample([*episode.session.token_ids.tolist(), *observed])
        with_seed_of_turn(episode)
        await episode.generate()


async def condensing(episode: Any) -> None:
    """Forgets everything but the question and the last completion, after every second turn."""
    while episode.can_rewrite:
        if episode.turns % 2:
            episode.observe(OBSERVED)
        else:
            episode.rewrite([*episode.prompt.token_ids, *episode.session.token_ids[-2:].tolist()])
        await episode.generate()


def environment(name: str, **rollout: Any) -> dict[str, Any]:
    return {"environment": f"{HERE}:{name}", "max_turns": 4, "max_tokens": 4, **rollout}


def by_tokens(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Differs within a group, by the tokens of the first turn."""
    return [float(np.mean(np.asarray(ids[:2]) % 7)) for ids in completion_ids]


REWARD = {"functions": [f"{HERE}:by_tokens"], "workers": 0}


# ---- gradients ------------------------------------------------------------------------------------------------------


def gradients(run: Path) -> dict[str, torch.Tensor]:
    """The last gradient of a run whose AdamW has no momentum."""
    state = load_file(run / "checkpoints/step-00000001/policy/rank-00000.safetensors")
    return {name: value for name, value in state.items() if name.endswith(".exp_avg")}


GRADIENTS = [
    ("seq_mean_token_mean", "token", False),
    ("token_mean", "sequence", "auto"),
    ("seq_mean_token_sum_norm", "token", "auto"),
]


@pytest.mark.parametrize(("aggregation", "level", "share"), with_whole_runs(GRADIENTS, GRADIENTS[1:]))
def test_samples_whose_prompt_is_the_whole_history_have_the_gradient_of_one_sequence(
    config: Config, metrics_of: Metrics, aggregation: str, level: str, share: Any
) -> None:
    """Also where the history is computed once for all samples."""
    runs, lines = {}, {}
    for name in ("appending", "repeating"):
        made = config(
            name,
            steps=1,
            rollout=environment(name, max_turns=3),
            algorithm={
                "updates_per_rollout": 1,
                "loss_aggregation": aggregation,
                "importance_sampling_level": level,
            },
            optim={"lr": 1e-3, "betas": (0.0, 0.999), "max_grad_norm": float("inf")},
            reward=REWARD,
            batch={"share_prompts": share},
        )
        runs[name] = gradients(train(made))
        (lines[name],) = metrics_of(Path(made.output))
    one, several = lines["appending"], lines["repeating"]
    assert (one["completion/samples_mean"], several["completion/samples_mean"]) == (1, 3)
    assert one["completion/repeated_tokens"] == 0 < several["completion/repeated_tokens"]
    for name in ("reward/mean", "reward/std", "completion/length_mean", "completion/truncated"):
        assert one[name] == several[name], name
    assert several["routing/agreement"] == one["routing/agreement"] == 1
    assert several["loss/grad_norm"] == pytest.approx(one["loss/grad_norm"], rel=1e-5)
    if share:
        assert several["batch/shared_tokens"] > one["batch/shared_tokens"]
    whole, divided = runs["appending"], runs["repeating"]
    assert whole.keys() == divided.keys()
    for name, gradient in whole.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(divided[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_an_episode_is_in_one_mini_batch_and_weighs_as_one_sequence(aggregation: Any) -> None:
    lengths = [[3, 2], [4], [1, 1, 5], [6]]
    episodes = [
        [replace(random_trajectory(10 * number + part, 2, length), group=0, episode=number, reward=1.0)
         for part, length in enumerate(parts)]
        for number, parts in enumerate(lengths)
    ]  # fmt: skip
    whole = [replace(random_trajectory(number, 2, sum(parts)), reward=1.0) for number, parts in enumerate(lengths)]

    def weights(trajectories: list[Trajectory]) -> list[dict[int, float]]:
        made = mini_batches(
            *stored(trajectories),
            Rank(),  # type: ignore[arg-type]
            updates=2,
            aggregation=aggregation,
            max_tokens=7,
            budget=16,
            packed=True,
        )
        found: list[dict[int, float]] = [{} for _ in made]
        for update, batches in enumerate(made):
            for batch in batches:
                for place, trajectory in enumerate(batch.trajectories):
                    (weight,) = set(batch.loss_weights[batch.sequence == place].tolist())
                    found[update][trajectory.row] = weight
        return found

    expected = weights(whole)
    found = weights([trajectory for episode in episodes for trajectory in episode])
    assert [sorted({row // 10 for row in update}) for update in found] == [[0, 1], [2, 3]]
    for of_parts, of_whole in zip(found, expected, strict=True):
        assert {weight for row, weight in of_parts.items()} == {of_whole[row // 10] for row in of_parts}
        assert all(weight == of_whole[row // 10] for row, weight in of_parts.items())


def test_the_overlong_filter_looks_at_the_end_of_an_episode() -> None:
    parts = [replace(random_trajectory(row, 2, 4), group=0, episode=row // 2, reward=1.0) for row in range(4)]
    parts[1], parts[2] = (replace(parts[row], finish_reason=FinishReason.LENGTH) for row in (1, 2))
    ((batch,),) = mini_batches(
        *stored(parts),
        Rank(),  # type: ignore[arg-type]
        updates=1,
        aggregation="seq_mean_token_mean",
        max_tokens=4,
        budget=100,
        packed=True,
        overlong_filter=True,
    )
    assert [trajectory.row for trajectory in batch.trajectories] == [2, 3]
    np.testing.assert_allclose(batch.loss_weights.numpy(), 1 / (2 * 8))  # two episodes, the second of eight tokens


# ---- whole runs -----------------------------------------------------------------------------------------------------


def test_an_environment_that_condenses_every_second_turn_trains_with_its_routes(
    config: Config, metrics_of: Metrics, demo_files: Any
) -> None:
    """Four turns in two samples; a run that stops and goes on is the same; an evaluation plays the same environment."""
    settings = {
        "rollout": environment("condensing"),
        "reward": REWARD,
        "eval": {"every": 1, "prompts": 3},
        "data": {"eval_path": str(demo_files.eval)},
        "log": {"completions": True, "traces": 8},
        "checkpoint": {"every": 0},
    }
    whole = train(config("whole", steps=2, **settings))
    for line in metrics_of(whole):
        assert (line["completion/samples_mean"], line["completion/samples_max"]) == (2, 2)
        assert 0 < line["completion/repeated_fraction"] < 1
        assert line["routing/agreement"] > 0.99
        assert line["mismatch/rollout_vs_old/k3_kl"] < 1e-6
        assert line["loss/grad_norm"] > 0
        assert "eval/reward" in line
    from moe_replay.train.output.completions import completion_steps, read_completions

    for path in completion_steps(whole).values():
        completions = read_completions(path)
        assert len(completions) == 2 * 16
        for first, second in zip(completions[::2], completions[1::2], strict=True):
            assert (first.group, first.sample, first.reward) == (second.group, second.sample, second.reward)
            assert first.advantage == second.advantage
    parts = config("parts", steps=2, **settings)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Job, "should_stop", lambda job, step: step == 1)
        train(parts)
    assert metrics_of(train(parts)) == metrics_of(whole)


class Interrupted(TransformersEngine):
    """Ends each turn after two tokens, as a weight update does; the weights that go on have the next version."""

    is_serial = False
    interruptions = 0

    async def generate_one(self, prompt: Any, params: SamplingParams) -> Any:
        if params.max_tokens <= 2:
            return await super().generate_one(prompt, params)
        samples = await super().generate_one(prompt, replace(params, max_tokens=2))
        self.interruptions += 1
        cut = {"finish_reason": FinishReason.ABORT}
        return [replace(one, **cut) if one.finish_reason is FinishReason.LENGTH else one for one in samples]


@pytest.mark.whole_runs
def test_partial_and_asynchronous_rollouts_have_rewritten_histories(
    config: Config, metrics_of: Metrics, demo_files: Any
) -> None:
    engine: Any = Interrupted.from_pretrained(demo_files.model, dtype="float32")
    rollout = environment("condensing", max_staleness=1, reproducible=False)
    try:
        lines = metrics_of(train(config(steps=3, rollout=rollout, reward=REWARD), engine))
    finally:
        engine.close()
    assert engine.interruptions > 2 * 4 * 16
    assert [line["completion/samples_mean"] for line in lines] == [2, 2, 2]
    assert max(line["completion/staleness_max"] for line in lines) == 1


# ---- rollout batches ------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(demo_files: Any) -> Iterator[Any]:
    made = TransformersEngine.from_pretrained(demo_files.model, dtype="float32")
    yield made
    made.close()


def rolled_out(made: Any, engine: Any) -> tuple[Any, list[Trajectory]]:
    prompts = [Prompt(row, "", (5 + row, 6, 7), {"solution": "1"}) for row in range(4)]
    tokenizer, rewards = load_tokenizer(made.model.path), [load_reward(f"{HERE}:by_tokens")]
    rollouts = Rollouts(made, engine, PromptStream(prompts), tokenizer, rewards, 48)
    try:
        batch = rollouts.next_batch(0)
        assert batch is not None
        return batch, rollouts._store.whole(batch, range(len(batch.headers)))
    finally:
        rollouts.close()


@pytest.mark.parametrize(("turns", "factors"), [("episode", [1, 1]), ("discounted", [0.5, 1]), ("last", [1])])
def test_an_episode_counts_once_and_its_samples_share_the_advantage(
    config: Config, engine: Any, turns: str, factors: list[float]
) -> None:
    algorithm = {"advantage_turns": turns, "advantage_discount": 0.5}
    batch, trajectories = rolled_out(config(rollout=environment("condensing"), algorithm=algorithm), engine)
    assert batch.metrics["completion/samples_mean"] == 2
    assert len(trajectories) == 16 * len(factors)
    by_group: dict[int, dict[int, list[Trajectory]]] = {}
    for trajectory, header in zip(trajectories, batch.headers, strict=True):
        assert (trajectory.group, trajectory.episode) == (header.group, header.episode)
        by_group.setdefault(trajectory.group, {}).setdefault(trajectory.episode, []).append(trajectory)
        check_versions(trajectory)
    rewards = np.array([[parts[0].reward for parts in group.values()] for group in by_group.values()])
    assert rewards.shape == (4, 4)
    assert batch.metrics["reward/mean"] == pytest.approx(rewards.mean())
    assert batch.metrics["reward/std"] == pytest.approx(rewards.std())
    for group, advantages in zip(by_group.values(), std_normalized(rewards), strict=True):
        for parts, advantage in zip(group.values(), advantages, strict=True):
            assert [part.advantage for part in parts] == pytest.approx([advantage * factor for factor in factors])


def test_each_sample_has_the_routes_of_its_own_prompt(config: Config, engine: Any) -> None:
    """The routes of a condensed prompt are those of a pass over it alone, not those of the history it comes from."""
    _, trajectories = rolled_out(config(rollout=environment("condensing")), engine)
    for first, second in zip(trajectories[::2], trajectories[1::2], strict=True):
        assert second.token_ids[:5].tolist() == [*first.token_ids[:3].tolist(), *first.token_ids[-2:].tolist()]
        assert int(second.sampled.argmax()) == 5
    again = engine.generate([t.token_ids[:-1].tolist() for t in trajectories], SamplingParams(max_tokens=1, seed=0))
    for trajectory, (sample,) in zip(trajectories, again, strict=True):
        routed = sample.trace.routed_experts[: len(trajectory) - 1]
        assert trajectory.trace.valid[:-1].all()
        assert np.array_equal(np.sort(trajectory.trace.routed_experts[:-1]), np.sort(routed))


def test_rewards_see_what_followed_each_prompt(config: Config, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def noting(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.extend(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    monkeypatch.setitem(globals(), "by_tokens", noting)
    _, trajectories = rolled_out(config(rollout=environment("condensing")), engine)
    assert len(seen) == 16
    expected = []
    for first, second in zip(trajectories[::2], trajectories[1::2], strict=True):
        parts = [one.token_ids[int(one.sampled.argmax()) :].tolist() for one in (first, second)]
        expected.append(parts[0] + parts[1])
    assert sorted(seen) == sorted(expected)


# ---- episodes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def episode(demo_files: Any, engine: Any) -> Episode:
    prompt = Prompt(3, "", (5, 6, 7), {})
    return Episode(
        prompt=prompt,
        session=Session(prompt.token_ids),
        engine=engine,
        params=SamplingParams(max_tokens=4, seed=1, ignore_eos=True),
        tokenizer=load_tokenizer(str(demo_files.model)),
        max_length=16,
        max_turns=5,
    )


def begun(episode: Episode) -> Episode:
    (sample,) = asyncio.run(episode.engine.generate_one(list(episode.prompt.token_ids), episode.params))
    asyncio.run(episode.start(sample))
    return episode


def test_a_prompt_that_continues_the_sequence_is_an_observation(episode: Episode) -> None:
    begun(episode)
    episode.rewrite([*episode.session.token_ids.tolist(), 8, 9])
    asyncio.run(episode.generate())
    (only,) = episode.finish()
    assert only.sampled.tolist() == [False] * 3 + [True] * 4 + [False] * 2 + [True] * 4


def test_a_prompt_that_does_not_begins_another_sample(episode: Episode) -> None:
    begun(episode)
    before = episode.session.token_ids.tolist()
    episode.rewrite([5, 6, 8])
    asyncio.run(episode.generate())
    first, second = episode.finish()
    assert first.token_ids.tolist() == before
    assert second.token_ids[:3].tolist() == [5, 6, 8]
    assert second.sampled.tolist() == [False] * 3 + [True] * 4


def test_a_prompt_that_no_turn_follows_is_no_sample(episode: Episode) -> None:
    begun(episode)
    episode.rewrite([5, 6, 8])
    episode.rewrite([5, 6, 9])
    assert len(episode.finish()) == 1
    asyncio.run(episode.generate())
    assert [one.token_ids[2] for one in episode.finish()] == [7, 9]


def test_equal_prompts_of_an_episode_have_different_samples(episode: Episode) -> None:
    begun(episode)
    for _ in range(3):
        episode.rewrite([5, 6, 7])
        asyncio.run(episode.generate())
    assert len({one.token_ids.tobytes() for one in episode.finish()}) == 4


def test_a_rewrite_makes_room_where_the_sequence_has_its_greatest_length(episode: Episode) -> None:
    begun(episode)
    episode.observe("1" * 50)
    asyncio.run(episode.generate())
    assert (episode.can_continue, episode.can_rewrite) == (False, True)
    episode.rewrite([5, 6, 7])
    assert episode.can_continue
    asyncio.run(episode.generate())
    assert len(episode.finish()) == 2


@pytest.mark.parametrize("length", [0, 16])
def test_a_prompt_that_leaves_no_room_is_refused(episode: Episode, length: int) -> None:
    begun(episode)
    assert not episode.fits_prompt([5] * length)
    assert episode.fits_prompt([5] * 15)
    with pytest.raises(EpisodeError, match=rf"row 3.*1 to 15 tokens.*found {length} tokens after turn 1"):
        episode.rewrite([5] * length)


def test_factors_of_an_advantage() -> None:
    assert turn_factors(3, "episode", 0.5) == [1, 1, 1]
    assert turn_factors(3, "discounted", 0.5) == [0.25, 0.5, 1]
    assert turn_factors(3, "last", 0.5) == [0, 0, 1]
    assert [turn_factors(1, turns, 0.5) for turns in ("episode", "discounted", "last")] == [[1]] * 3


def test_headers_with_an_episode_travel(tmp_path: Path) -> None:
    from moe_replay.train.trajectories.wire import batch_from_bytes, batch_to_bytes

    batch, _ = stored([replace(random_trajectory(row, 2, 3), episode=row) for row in range(3)])
    assert [header.episode for header in batch_from_bytes(batch_to_bytes(batch)).headers] == [0, 1, 2]
    assert json.dumps(batch.metrics) == "{}"
