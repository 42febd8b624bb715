"""Tokens are drawn from the distribution whose log-probs are reported."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_replay.engines.requests import request_seed
from moe_replay.engines.transformers import draw, sampled_logprobs, uniforms
from moe_replay.errors import EngineError
from moe_replay.records import SamplingParams


def logits(seed: int, rows: int = 1, columns: int = 10) -> torch.Tensor:
    return 3 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 10, 50]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)
def test_tokens_come_as_often_as_their_log_probs_say(seed, temperature, top_k, top_p) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    logprobs = sampled_logprobs(logits(seed), params)
    assert logprobs.exp().sum() == pytest.approx(1, abs=1e-5)
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    tokens = draw(logprobs.expand(len(grid), -1), grid, params)
    shares = torch.bincount(tokens, minlength=10) / len(grid)
    torch.testing.assert_close(shares, logprobs[0].exp(), atol=1e-3, rtol=0)


def test_what_is_cut_off_is_what_should_be() -> None:
    row = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()

    def kept(**more) -> list[float]:
        return [round(p, 4) for p in sampled_logprobs(row, SamplingParams(**more)).exp()[0].tolist()]

    assert kept(top_p=0.5) == [1, 0, 0, 0]
    assert kept(top_p=0.6) == [0.625, 0.375, 0, 0]
    assert kept(top_k=3) == [round(p / 0.95, 4) for p in (0.5, 0.3, 0.15)] + [0]
    assert kept(temperature=0.5) == pytest.approx([p * p / 0.365 for p in (0.5, 0.3, 0.15, 0.05)], abs=1e-3)
    assert kept(temperature=0) == [0.5, 0.3, 0.15, 0.05]


def test_greedy_takes_the_likeliest() -> None:
    params = SamplingParams(temperature=0)
    many = logits(0, rows=50)
    assert torch.equal(draw(sampled_logprobs(many, params), torch.rand(50), params), many.argmax(-1))


def test_no_number_draws_a_token_of_probability_zero() -> None:
    impossible = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    params = SamplingParams()
    for number in (0.0, 0.5, 1 - 2**-53):
        assert draw(impossible.log_softmax(-1), torch.tensor([number], dtype=torch.float64), params).tolist() == [1]


def test_seeds_differ_by_prompt_and_sample() -> None:
    numbers = uniforms([[1], [2], [1]], 4, SamplingParams(n=2, seed=0))
    assert numbers.shape == (6, 4)
    assert len({tuple(row) for row in numbers[:4].tolist()}) == 4
    assert torch.equal(numbers[:2], numbers[4:])
    assert torch.equal(numbers[:2, :2], uniforms([[1]], 2, SamplingParams(n=2, seed=0)))
    assert not torch.equal(uniforms([[1]], 4, SamplingParams()), uniforms([[1]], 4, SamplingParams()))
    apart = uniforms([[1], [2], [1]], 4, SamplingParams(n=2, seeds=(0, 0, 1)))
    assert torch.equal(apart[:4], numbers[:4])
    assert torch.equal(apart[4:], uniforms([[1]], 4, SamplingParams(n=2, seed=1)))
    assert not torch.equal(apart[4:], apart[:2])


@pytest.mark.parametrize(
    "wrong", [{"n": 0}, {"max_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"seed": -1}]
)
def test_parameters_that_make_no_sense(wrong: dict[str, int]) -> None:
    with pytest.raises(EngineError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_the_seed_of_a_request_depends_on_its_prompt() -> None:
    params = SamplingParams(seed=3)
    assert request_seed(params, [1, 2]) == request_seed(params, (1, 2))
    assert len({request_seed(SamplingParams(seed=seed), prompt) for seed in (3, 4) for prompt in ([1, 2], [2, 1])}) == 4
    assert request_seed(SamplingParams(), [1, 2]) is None
