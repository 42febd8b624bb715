"""Speculative decoding in the real vLLM on CPU: drafts that are rejected leave nothing behind in the routes.

vLLM has no kernel on CPU that accepts or rejects drafts; here PyTorch does it, greedily. All else is vLLM: drafts from
the prompt (ngram), a forward over drafts, the slots that rejected ones have used, and both captures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_replay.records import SamplingParams
from tests.engines.tiny import VOCABULARY, assert_sampled_from, tiny_model
from tests.real_vllm.conftest import NEEDS_VLLM, SHARED

DRAFTS = 3


class Verdicts:
    """Accepts drafts as far as they are what the model would choose, and counts them, in the process of the engine too.

    counts   accepted and rejected
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(2, dtype=torch.int64).share_memory_()

    def __call__(
        self,
        drafts: Tensor,
        counts: list[int],
        longest: int,
        ends: Tensor,
        draft_probs: Tensor | None,
        logits: Tensor,
        bonus: Tensor,
        sampling: Any,
        **options: Any,
    ) -> Tensor:
        assert sampling.all_greedy
        found = torch.full((len(counts), longest + 1), -1, dtype=torch.int32)
        best, start = logits.argmax(-1), 0
        for row, count in enumerate(counts):
            own, drafted = best[start : start + count], drafts[start : start + count]
            right = int((own == drafted).int().cumprod(0).sum())
            chosen = torch.cat([own, bonus[row]])[: right + 1]  # the model's own token after the last right draft
            found[row, : right + 1] = chosen.int()
            self.counts += torch.tensor([right, count - right])
            start += count
        return found


@pytest.fixture(scope="module")
def verdicts() -> Iterator[Verdicts]:
    sampler = pytest.importorskip("vllm.v1.sample.rejection_sampler", reason=NEEDS_VLLM)
    found = Verdicts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "rejection_sample", found)
        yield found


@pytest.fixture(scope="module")
def engine(verdicts: Verdicts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from moe_replay.engines.vllm.engine import VllmEngine

    folder: Path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3_moe").save_pretrained(folder)
    drafts = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with VllmEngine(folder, **SHARED, speculative_config=drafts, capture="kv_slot") as started:
        yield started


def test_routes_are_those_of_the_tokens_that_were_kept(engine: Any, verdicts: Verdicts) -> None:
    random = np.random.default_rng(0)
    phrases = [random.integers(1, VOCABULARY, 4).tolist() * 5 for _ in range(8)]  # repeated: they are drafted from
    groups = engine.generate(phrases, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    for phrase, (sample,) in zip(phrases, groups, strict=True):
        assert sample.prompt_ids.tolist() == phrase
        assert len(sample.completion_ids) == 60
        assert sample.trace.valid[:-1].all()
        assert_sampled_from(tiny_model("qwen3_moe"), sample, 1.0)
    assert (verdicts.counts > 20).all()
