"""Truncated sampling: ratios over the support that was sampled from are those of two equal policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import moe_replay as mr
from moe_replay.errors import AlignmentError, EngineError
from moe_replay.records import SamplingParams
from moe_replay.sampling_mask import SamplingMask
from moe_replay.train.config.keys import ConfigError
from moe_replay.train.config.sections import RolloutConfig
from moe_replay.train.learn.batches import make_micro_batch
from moe_replay.train.loop import train
from moe_replay.train.rollout.groups import check_mask
from moe_replay.train.rollout.rollouts import mask_metrics, sampling_params
from moe_replay.train.setup.engines import start_request
from tests.train.trajectories import random_mask, random_trajectory

Config = Callable[..., Any]
Metrics = Callable[[Path], list[dict[str, Any]]]
MEAN_RATIO = "mismatch/rollout_vs_old/ratio/mean"


def test_ratios_are_one_with_the_mask_and_biased_without(config: Config, metrics_of: Metrics) -> None:
    """The engine is Transformers in float32, whose log-probs the trainer's are, but for the truncation."""
    lines = {}
    for mask in ("auto", "off"):
        rollout = {"top_p": 0.7, "sampling_mask": mask}
        made = config(mask, steps=1, rollout=rollout, algorithm={"beta": 0.01, "updates_per_rollout": 1})
        (lines[mask],) = metrics_of(train(made))
    masked, biased = lines["auto"], lines["off"]
    assert masked[MEAN_RATIO] == pytest.approx(1, abs=1e-5)
    assert masked["mismatch/rollout_vs_old/k3_kl"] < 1e-8
    assert biased[MEAN_RATIO] < 0.95
    assert biased["mismatch/rollout_vs_old/k3_kl"] > 1e-3
    assert masked["mismatch/old_vs_train/k3_kl"] == biased["mismatch/old_vs_train/k3_kl"] == 0
    assert masked["loss/reference_kl"] == pytest.approx(0, abs=1e-8)  # the reference is scored over the same tokens
    assert masked["loss/entropy"] < biased["loss/entropy"]
    assert 0 < masked["sampling/kept_fraction"] < 0.7
    assert masked["sampling/kept_tokens_mean"] <= masked["sampling/kept_tokens_max"]
    assert not any(name.startswith("sampling/") for name in biased)


def test_masks_are_asked_for_where_sampling_is_truncated() -> None:
    def asks(**settings: Any) -> bool:
        rollout = RolloutConfig(engine="transformers", **settings)
        return sampling_params(rollout).sampling_mask

    assert not asks()
    assert asks(top_p=0.9)
    assert asks(top_k=20)
    assert not asks(top_k=20, sampling_mask="off")
    params = sampling_params(RolloutConfig(top_p=0.9, top_k=20, temperature=0.5, max_tokens=7, num_generations=3))
    assert params == SamplingParams(n=3, max_tokens=7, temperature=0.5, top_p=0.9, top_k=20, sampling_mask=True)


def test_an_engine_is_started_to_return_masks(config: Config) -> None:
    for top_p, wanted in ((1.0, False), (0.9, True)):
        made = config(rollout={"top_p": top_p})
        assert start_request(made.rollout, made.model, "folder", 9).sampling_mask is wanted


def test_an_engine_without_masks_needs_the_bias_to_be_accepted(config: Config) -> None:
    servers = {"engine": "sglang_server", "urls": ["http://127.0.0.1:1"], "top_k": 20}
    with pytest.raises((ConfigError, ValueError), match=r"rollout\.sampling_mask: sglang_server.*sampling_mask = off"):
        config(rollout=servers)
    assert config(rollout=servers | {"sampling_mask": "off"}).rollout.top_k == 20


def test_samples_without_their_mask_are_refused() -> None:
    sequence = random_trajectory(4, 3, 5)
    check_mask(sequence, SamplingParams(top_p=0.9), 4)
    check_mask(replace(sequence, sampling_mask=random_mask(sequence, 97)), SamplingParams(sampling_mask=True), 4)
    with pytest.raises(EngineError, match=r"without their sampling mask \[sample row 4\].*top_p 0\.9"):
        check_mask(sequence, SamplingParams(top_p=0.9, sampling_mask=True), 4)


def test_masks_of_a_sequence_must_be_of_its_tokens() -> None:
    sequence = random_trajectory(4, 3, 5)
    mask = random_mask(sequence, 97)
    with pytest.raises(EngineError, match="one support per sampled token"):
        replace(sequence, sampling_mask=mask.take(np.arange(4)))
    sampled = int(np.flatnonzero(mask.counts)[0])
    other = next(i for i in range(97) if i not in mask.token_ids[mask.offsets[sampled] : mask.offsets[sampled + 1]])
    ids = sequence.token_ids.copy()
    ids[sampled] = other
    trace = mr.RouteTrace(
        ids, sequence.trace.routed_experts, sequence.trace.layers, sequence.trace.valid, 0, num_experts=8
    )
    with pytest.raises(EngineError, match=rf"not in its own support \[token {sampled}\].*token id {other} \(1 such"):
        replace(sequence, sampling_mask=mask, token_ids=ids, trace=trace)


def test_a_micro_batch_has_masks_of_all_its_sequences_or_of_none() -> None:
    one, other = random_trajectory(1, 3, 5), random_trajectory(2, 3, 5)
    one = replace(one, sampling_mask=random_mask(one, 97))
    with pytest.raises(AlignmentError, match=r"others have none \[sample row 2\]"):
        make_micro_batch([one, other], [1.0, 1.0], mr.TokenLayout.packed([8, 8]), torch.device("cpu"))


def test_what_is_left_of_the_vocabulary_is_counted() -> None:
    sequence = random_trajectory(1, 2, 4)
    kept = np.zeros((6, 97), bool)
    kept[np.arange(6), sequence.token_ids] = True
    kept[:2] = True
    kept[2] = True
    mask = SamplingMask(97, kept.sum(1), np.nonzero(kept)[1])
    found = mask_metrics([replace(sequence, sampling_mask=mask)])
    assert found == {
        "sampling/kept_tokens_mean": (97 + 3) / 4,
        "sampling/kept_tokens_max": 97,
        "sampling/kept_fraction": pytest.approx((97 + 3) / 4 / 97),
        "sampling/single_token": 0.75,
    }
    assert mask_metrics([sequence]) == {}
