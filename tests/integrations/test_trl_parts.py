"""The parts of the TRL integration that need no TRL."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_replay as mr
from moe_replay.integrations.trl_generation import GenerationWatch
from moe_replay.integrations.trl_passes import ReplayMetrics, RoutedSample, batch_layout, rollout_logprobs
from tests.integrations.trl_tiny import model

LAYERS = (1, 3)
TOPOLOGY = mr.MoeTopology(4, tuple(mr.routes.MoeLayer(layer, 4, 2) for layer in LAYERS))
lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5)


@given(lengths, st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=50)
def test_a_layout_is_what_trl_pads(parts: list[tuple[int, int]], left: int, right: int) -> None:
    """Prompts on the left, completions on the right, each to a common width: torch says the same."""
    numbers = iter(range(1, 1000))
    drawn = [([next(numbers) for _ in range(p)], [next(numbers) for _ in range(c)]) for p, c in parts]
    prompt_width = max(p for p, _ in parts) + left
    width = prompt_width + max(c for _, c in parts) + right
    expected = [[0] * (prompt_width - len(p)) + p + c + [0] * (width - prompt_width - len(c)) for p, c in drawn]

    samples = [RoutedSample((*p, *c), len(p)) for p, c in drawn]
    layout = batch_layout(samples, prompt_width, width)
    np.testing.assert_array_equal(layout.fed_token_ids([s.token_ids for s in samples], pad=0), expected)


@pytest.mark.parametrize(("prompt_width", "width"), [(2, 9), (3, 4)])
def test_a_sample_that_does_not_fit_is_refused(prompt_width: int, width: int) -> None:
    with pytest.raises(mr.errors.LayoutError, match=r"does not fit .*sample 1.* found 3 \+ 2 tokens"):
        batch_layout([RoutedSample((5, 6), 1), RoutedSample((1, 2, 3, 4, 5), 3)], prompt_width, width)


def test_passes_of_a_finished_rank_add_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ZeRO-3 or FSDP a rank goes on calling the model until all others have their samples too."""
    policy = model(use_cache=True).eval()
    replay = mr.attach(policy)
    prompts = [[3, 4, 5], [6, 7]]

    def drawn(passes_of_others: int) -> tuple[int, list[RoutedSample]]:
        others = iter([True] * passes_of_others)
        monkeypatch.setattr(policy, "_has_unfinished_sequences", lambda done, *_, **__: not done or next(others, False))
        watch = GenerationWatch(policy, replay, 0.7)
        torch.manual_seed(0)
        with watch.watching():
            ids = policy.generate(
                input_ids=torch.tensor([[3, 4, 5], [0, 6, 7]]),
                attention_mask=torch.tensor([[1, 1, 1], [0, 1, 1]]),
                max_new_tokens=5,
                do_sample=True,
                eos_token_id=100,
                synced_gpus=True,
            )[:, 3:]
        return len(watch._fed), watch.samples(prompts, [ids[0].tolist(), ids[1, :3].tolist()], 0)

    (passes, alone), (more, waited) = drawn(0), drawn(3)
    assert (passes, more) == (5, 8)
    for one, other in zip(alone, waited, strict=True):
        assert one.trace is not None
        assert other.trace is not None
        assert other.token_ids == one.token_ids
        assert other.logprobs == one.logprobs
        np.testing.assert_array_equal(other.trace.routed_experts, one.trace.routed_experts)
        np.testing.assert_array_equal(other.trace.valid, one.trace.valid)


def test_passes_with_other_tokens_than_the_last_are_refused() -> None:
    policy = model().eval()
    watch = GenerationWatch(policy, None, 1.0)
    with watch.watching(), torch.no_grad():
        for ids in ([[3, 4]], [[5]], [[6]], [[7]]):
            policy(input_ids=torch.tensor(ids))
    assert [s.token_ids for s in watch.samples([[3, 4]], [[5, 6, 7]], 0)] == [(3, 4, 5, 6, 7)]
    with pytest.raises(mr.errors.AlignmentError, match="fed other tokens than it returned"):
        watch.samples([[3, 4]], [[5]], 0)


def routes(seed: int, rows: int, valid: list[bool]) -> tuple[mr.RouteBatch, torch.Tensor]:
    random = np.random.default_rng(seed)
    experts = np.stack([[random.permutation(4)[:2] for _ in LAYERS] for _ in range(rows)])
    trace = mr.RouteTrace(np.arange(rows), experts, LAYERS, valid, num_experts=4)
    batch = mr.RouteBatch.from_traces([trace], layout_of(rows))
    return batch, torch.from_numpy(np.sort(experts, -1)).transpose(0, 1)


def layout_of(rows: int) -> mr.TokenLayout:
    return mr.TokenLayout.padded([rows], rows + 2)


def test_metrics_add_up_over_micro_batches() -> None:
    agreeing, covered, tokens = np.zeros(2), 0, 0
    differences = []
    metrics = ReplayMetrics(TOPOLOGY, torch.device("cpu"))
    for step in range(6):
        rows = 5 + step
        valid = [row % (2 + step) != 0 for row in range(rows)]
        (recorded, ours), (native, theirs) = (routes(step + add, rows, valid) for add in (0, 100))
        metrics.add_routes(recorded, native, layout_of(rows), replayed=True)
        agreeing += ((ours == theirs).all(-1) & torch.tensor(valid)).sum(1).numpy()
        covered += sum(valid)
        tokens += rows
        old, new = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(rows))
        mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
        metrics.add_logprobs("old_vs_train", old, new, mask)
        metrics.add_logprobs("rollout_vs_old", None, old, mask)
        differences.append((new - old)[mask.bool()])

    found = metrics.flush()
    assert found["routing/replayed_fraction"] == pytest.approx(covered / tokens)
    assert found["routing/unrouted_fraction"] == pytest.approx(1 - covered / tokens)
    assert found["routing/agreement"] == pytest.approx(agreeing.sum() / (2 * covered))
    assert [found[f"routing/agreement/layer_{layer:03d}"] for layer in LAYERS] == pytest.approx(agreeing / covered)
    d = torch.cat(differences)
    assert found["mismatch/old_vs_train/k1_kl"] == pytest.approx(-d.mean().item(), rel=1e-5)
    assert found["mismatch/old_vs_train/ratio/max"] == pytest.approx(math.exp(d.max().item()), rel=1e-5)
    assert not any(name.startswith("mismatch/rollout") for name in found)
    assert metrics.flush() == {}


def test_what_is_compared_only_is_not_replayed() -> None:
    metrics = ReplayMetrics(TOPOLOGY, torch.device("cpu"))
    recorded, _ = routes(0, 4, [True, True, True, False])
    metrics.add_routes(recorded, recorded, layout_of(4), replayed=False)
    metrics.add_uncovered(4)
    found = metrics.flush()
    assert found["routing/replayed_fraction"] == 0.0
    assert found["routing/unrouted_fraction"] == pytest.approx(5 / 8)
    assert found["routing/agreement"] == 1.0


def test_log_probs_that_an_engine_does_not_know_count_nothing() -> None:
    samples = [RoutedSample((1, 2, 3), 1, logprobs=[-1.0, None]), RoutedSample((1, 2), 1, logprobs=[-3.0])]
    mask = torch.ones(2, 3)
    found = rollout_logprobs(samples, mask)
    torch.testing.assert_close(
        found, torch.tensor([[-1.0, torch.nan, torch.nan], [-3.0, torch.nan, torch.nan]]), equal_nan=True
    )
    metrics = ReplayMetrics(TOPOLOGY, torch.device("cpu"))
    metrics.add_logprobs("rollout_vs_train", found, torch.full((2, 3), -2.0), mask)
    assert metrics.flush()["mismatch/rollout_vs_train/logprob_abs_diff/mean"] == 1.0
    assert rollout_logprobs([RoutedSample((1, 2), 1)], mask) is None
