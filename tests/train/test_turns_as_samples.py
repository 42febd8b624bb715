"""The environment in docs/coming-from.md does what ms-swift's scheduler does: each round is a separate sample."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from moe_replay.engines.session import Session
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.records import SamplingParams
from moe_replay.train.rollout.environments import Episode
from moe_replay.train.rollout.prompts import Prompt
from moe_replay.train.setup.sources import load_tokenizer
from tests.models import tiny_qwen3_moe
from tests.support.documented import documented_environment

TEMPLATE = "{% for message in messages %}{{ message.role }}={{ message.content }};{% endfor %}"
QUESTION = [{"role": "user", "content": "1+1"}]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Any]:
    with documented_environment("coming-from.md", "environments:thinking_tips_scheduler", tmp_path) as function:
        yield function


@pytest.fixture
def tokenizer(demo_files: Any) -> Any:
    loaded = load_tokenizer(str(demo_files.model))
    loaded.chat_template = TEMPLATE
    return loaded


class Round:
    """The part of an episode that the environment uses, after a first round that is given."""

    def __init__(self, completion: str, tokenizer: Any, *, can_rewrite: bool = True) -> None:
        self.completion, self.tokenizer, self.can_rewrite = completion, tokenizer, can_rewrite
        self.prompt = SimpleNamespace(content=QUESTION, columns={"solution": "2"})
        self.prompts: list[str] = []
        self.sampled = 0

    def fits_prompt(self, prompt: str) -> bool:
        return bool(prompt)

    def rewrite(self, prompt: str) -> None:
        self.prompts.append(prompt)

    async def generate(self) -> None:
        self.sampled += 1


def test_the_next_round_has_the_answer_without_its_thoughts(environment: Any, tokenizer: Any) -> None:
    episode = Round("1 and 1</think> \\boxed{3}", tokenizer)
    asyncio.run(environment(episode))
    (prompt,) = episode.prompts
    assert prompt.startswith("user=1+1;assistant=\\boxed{3};user=The answer is not correct")
    assert episode.sampled == 1


@pytest.mark.parametrize(("completion", "can_rewrite"), [("so</think>\\boxed{2}", True), ("\\boxed{3}", False)])
def test_no_round_follows_a_right_answer_or_the_last_turn(
    environment: Any, tokenizer: Any, completion: str, can_rewrite: bool
) -> None:
    episode = Round(completion, tokenizer, can_rewrite=can_rewrite)
    asyncio.run(environment(episode))
    assert (episode.prompts, episode.sampled) == ([], 0)


def test_each_round_is_a_sample_with_its_routes(environment: Any, tokenizer: Any) -> None:
    prompt = Prompt(0, QUESTION, (5, 6, 7), {"solution": "2"})
    episode = Episode(
        prompt=prompt,
        session=Session(prompt.token_ids),
        engine=TransformersEngine(tiny_qwen3_moe(vocab_size=len(tokenizer))),
        params=SamplingParams(max_tokens=4, seed=1, ignore_eos=True),
        tokenizer=tokenizer,
        max_length=256,
        max_turns=2,
    )
    (sample,) = asyncio.run(episode.engine.generate_one(list(prompt.token_ids), episode.params))
    asyncio.run(episode.start(sample))
    asyncio.run(environment(episode))
    first, second = episode.finish()
    assert first.token_ids[:3].tolist() == [5, 6, 7]
    assert second.sampled.sum() == first.sampled.sum() == 4
    for round_ in (first, second):
        assert len(round_.trace) == len(round_.token_ids)
        assert round_.trace.valid[:-1].all()  # all but the last token, which was never fed
