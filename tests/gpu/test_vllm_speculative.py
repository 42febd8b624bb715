"""Speculative decoding on a GPU: drafts that are rejected leave nothing behind in the routes.

Drafts come from the prompt, from a smaller model, which is an MoE as well, and from layers for multi-token prediction,
which have routers of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from moe_replay.records import FinishReason, SamplingParams
from tests.gpu.engines import NEEDS_GPU, ON_CPU, Case, random_prompts, started
from tests.gpu.models import VOCABULARY, add_mtp_layer, random_model

pytestmark = [*NEEDS_GPU, pytest.mark.skipif(ON_CPU, reason="vLLM has no kernel on CPU that accepts drafts")]

DRAFTS = 3


class Setting(NamedTuple):
    """What drafts, for which model, and who records routes."""

    method: str
    family: str
    dtype: str
    capture: str


SETTINGS = [
    Setting(method, family, dtype, capture)
    for method, family, dtype in (
        ("ngram", "qwen3_moe", "float32"),
        ("draft_model", "qwen3_moe", "float32"),
        ("mtp", "glm4_moe", "float32"),
        ("mtp", "deepseek_v3", "bfloat16"),
    )
    for capture in ("kv_slot", "cross_check")
    if (method, capture) != ("draft_model", "cross_check")  # vLLM 0.32 has no capture of its own beside a draft model
]


class Drafting(NamedTuple):
    """An engine that drafts."""

    case: Case
    method: str

    def sampled(self, prompts: list[list[int]], params: SamplingParams) -> tuple[list[Any], int, int]:
        """Return samples, and how many drafts were accepted and rejected."""
        self.case.profile(on=True)
        samples = self.case.sampled(prompts, params)
        counts = self.case.profile(on=False)
        kept = sum(len(sample.trace) - 1 for sample in samples)
        rejected = int(counts["tokens"]) - kept
        accepted = int(counts["drafts"]) - rejected
        print(f"{self.method}: {counts['drafts']} drafts, {accepted} accepted, {counts['steps']} steps")
        return samples, accepted, rejected


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafting]:
    setting: Setting = request.param
    speculation: dict[str, Any] = {"method": setting.method, "num_speculative_tokens": DRAFTS}
    complete = None
    if setting.method == "ngram":
        speculation |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    elif setting.method == "draft_model":
        speculation["model"] = str(_similar_model(setting, tmp_path_factory.mktemp("drafter")))
    else:
        complete = add_mtp_layer
    # More than all prompts: vLLM 0.32 sizes the workspace of a draft MoE without the token that each request adds.
    options = {"speculative_config": speculation, "capture": setting.capture, "max_num_batched_tokens": 1024}
    folder = tmp_path_factory.mktemp("model")
    with started(setting.family, setting.dtype, folder, complete=complete, **options) as case:
        yield Drafting(case, setting.method)


def _similar_model(setting: Setting, folder: Path) -> Path:
    """Save a model that often chooses as the one of seed 0 does, and not always."""
    model = random_model(setting.family, getattr(torch, setting.dtype))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.add_(noise * parameter.std() * 0.1 if parameter.dim() > 1 else 0)
    model.save_pretrained(folder)
    return folder


def phrases(number: int, seed: int = 0) -> list[list[int]]:
    """Prompts that repeat themselves: drafts can be made from them."""
    random = np.random.default_rng(seed)
    return [random.integers(2, VOCABULARY, 4).tolist() * 5 for _ in range(number)]


def test_routes_are_those_of_the_tokens_that_were_kept(drafting: Drafting) -> None:
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    samples, accepted, rejected = drafting.sampled(phrases(12), params)
    assert [len(sample.completion_ids) for sample in samples] == [200] * 12
    assert rejected > 100
    if drafting.method != "mtp":  # random layers hardly ever predict what a random model chooses
        assert accepted > 100
    drafting.case.assert_sampled_from(drafting.case.model, samples)


def test_several_samples_at_a_temperature(drafting: Drafting) -> None:
    prompts = random_prompts(8, 60, seed=1)
    samples, _, rejected = drafting.sampled(prompts, SamplingParams(n=2, max_tokens=100, ignore_eos=True))
    assert rejected > 100
    drafting.case.assert_sampled_from(drafting.case.model, samples)


def test_a_stop_token_among_accepted_drafts_ends_a_sample(drafting: Drafting) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    prompts = phrases(6, seed=2)
    whole = drafting.case.sampled(prompts, params)
    for prompt, sample in zip(prompts, whole, strict=True):
        completion = sample.completion_ids.tolist()
        stop = completion[-1]
        (ended,) = drafting.case.sampled(
            [prompt], SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
        )
        assert ended.finish_reason is FinishReason.STOP
        assert ended.completion_ids[-1] == stop
        assert stop not in ended.completion_ids[:-1]
        assert len(ended.trace) == len(prompt) + len(ended.completion_ids)
        assert ended.trace.valid[:-1].all()
