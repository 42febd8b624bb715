"""Prompts that samples share: log-probs, loss and gradients of the batch in which every sample has its own copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers")

import moe_replay as mr
from moe_replay.errors import AlignmentError
from moe_replay.records import FinishReason, MicroBatch, Trajectory, TrajectoryHeader
from moe_replay.routes.layout import Prefix, TokenLayout
from moe_replay.train.backends.attention import use_attention
from moe_replay.train.backends.base import Routing, apply_routing, captured_routes
from moe_replay.train.backends.logprobs import HeadScores
from moe_replay.train.learn import sharing
from moe_replay.train.learn.batches import mini_batches
from moe_replay.train.learn.sharing import Sharing, divide_groups, num_differing, shared_bins
from tests.models import gradients, perturb_routers, tiny_qwen3_moe
from tests.train.trajectories import LAYERS, NUM_EXPERTS, TOP_K, stored

CPU = torch.device("cpu")
ROUTINGS = {
    "off": Routing("native"),
    "r2": Routing("replay", "recorded"),
    "r3": Routing("replay", "rollout"),
}


class InFloat64(TorchFunctionMode):
    """Computes in float64 what a model, its head and its losses compute in float32 in any precision."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if function is Tensor.float:
            function = Tensor.double
        return function(*map(widened, args), **{name: widened(value) for name, value in (kwargs or {}).items()})


def backward(loss: Tensor) -> None:
    """Do `loss.backward()`, which itself would leave the mode."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)


# ---- samples ---------------------------------------------------------------------------------------------------------


def sample(
    group: int, ids: np.ndarray, first: int, experts: np.ndarray, covered: np.ndarray, row: int, observed: int = 0
) -> Trajectory:
    """A sample whose tokens are its own from `first` on, but for `observed` ones behind the first of them."""
    chance = np.random.default_rng(row)
    sampled = np.arange(len(ids)) >= first
    sampled[first + 1 : first + 1 + observed] = False
    return Trajectory(
        row=row,
        group=group,
        token_ids=ids,
        logprobs=np.where(sampled, -3 - chance.random(len(ids)), 0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int64),
        trace=mr.RouteTrace(ids, experts, LAYERS, covered, num_experts=NUM_EXPERTS),
        finish_reason=FinishReason.STOP,
        reward=float(chance.random()),
        advantage=float(chance.normal()),
    )


def experts_of(chance: np.random.Generator, tokens: int) -> np.ndarray:
    return np.argsort(chance.random((tokens, len(LAYERS), NUM_EXPERTS)), -1)[..., :TOP_K].astype(np.uint8)


@dataclass(frozen=True)
class Group:
    """Sizes of the samples of a group.

    prompt        tokens of the prompt
    completions   sampled tokens of each sample
    differs_at    token of the prompt from which a sample's routes are its own; None: nowhere
    continues     earlier sample whose tokens a sample begins with, as the next turn does; None: the prompt alone
    """

    prompt: int
    completions: tuple[int, ...]
    differs_at: tuple[int | None, ...]
    continues: tuple[int | None, ...]

    def samples(self, number: int, coverage: float, observed: int = 0) -> list[Trajectory]:
        chance = np.random.default_rng(number)
        ids, experts = chance.integers(1, 90, self.prompt), experts_of(chance, self.prompt)
        covered = chance.random((self.prompt, len(LAYERS))) < coverage
        made: list[Trajectory] = []
        for index, (length, differs_at, turn) in enumerate(
            zip(self.completions, self.differs_at, self.continues, strict=True)
        ):
            before = (ids, experts, covered)
            if turn is not None and turn < index:
                trace = made[turn].trace
                before = (trace.token_ids, np.array(trace.routed_experts), np.array(trace.valid))
                before[1][-1], before[2][-1] = experts_of(chance, 1)[0], True  # it is routed in the next turn
            own = (chance.integers(1, 90, length), experts_of(chance, length))
            own = (*own, chance.random((length, len(LAYERS))) < coverage)
            own[2][-1] = False  # the last token was not routed
            tokens, routed, valid = (np.concatenate(parts) for parts in zip(before, own, strict=True))
            if differs_at is not None:
                routed[differs_at % self.prompt :] = experts_of(chance, len(routed) - differs_at % self.prompt)
            routed = np.where(valid[..., None], routed, 0)
            made.append(
                sample(
                    number, tokens.astype(np.int32), len(tokens) - length, routed, valid, 1000 * number + index,
                    min(observed, length - 2) if length > 2 else 0,
                )
            )  # fmt: skip
        return made


GROUPS = (
    Group(9, (4, 6, 1, 3), (None, None, None, None), (None,) * 4),
    Group(12, (5, 5, 2, 7), (None, 4, 11, None), (None,) * 4),
    Group(3, (6, 4, 8), (None, None, None), (None, 0, 1)),
    Group(5, (3,), (None,), (None,)),
)


def samples_of(groups: Sequence[Group], coverage: float = 0.9, observed: int = 0) -> list[Trajectory]:
    return [one for number, group in enumerate(groups) for one in group.samples(number, coverage, observed)]


# ---- passes ----------------------------------------------------------------------------------------------------------


class Policy:
    """The part of a backend that lays out and runs micro-batches: a model in float64 with replay attached."""

    device = CPU
    data_rank, data_size, micro_batch_multiple = 0, 1, 1

    def __init__(self, **overrides: Any) -> None:
        self.model = tiny_qwen3_moe(**overrides).double()
        if hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")  # grouped GEMMs have no float64
        use_attention(self.model, "auto", CPU, torch.float64, log=False)
        assert self.model.config._attn_implementation == "blocks"
        self.replay = mr.attach(self.model)
        self.chunk_layers = (self.replay.layers,)
        self.scores = HeadScores(self.model, chunk=7)
        self._weights = {name: value.clone() for name, value in self.model.state_dict().items()}

    def layout(self, lengths: Sequence[int], prefixes: Sequence[Prefix] = ()) -> TokenLayout:
        return TokenLayout.shared(lengths, prefixes) if prefixes else TokenLayout.packed(lengths)

    def restore(self) -> None:
        self.model.load_state_dict(self._weights)


@cache
def policy() -> Policy:
    return Policy()


class Result(NamedTuple):
    """Log-probs by (row of the data set, index of the scored token), the loss, and gradients by parameter."""

    logprobs: dict[tuple[int, int], float]
    loss: float
    gradients: dict[str, Tensor]


def batches_of(
    made: Policy, trajectories: Sequence[Trajectory], budget: int, sharing: Sharing | None
) -> list[MicroBatch]:
    (batches,) = mini_batches(
        *stored(trajectories),
        made,  # type: ignore[arg-type]
        updates=1,
        aggregation="seq_mean_token_mean",
        max_tokens=64,
        budget=budget,
        packed=True,
        sharing=sharing,
    )
    return batches


def trained(made: Policy, batches: Sequence[MicroBatch], mode: str) -> Result:
    """The old-log-prob pass, other weights, and forward and backward of all micro-batches."""
    made.restore()
    with InFloat64():
        if mode == "r2":
            for batch in batches:
                with torch.no_grad(), apply_routing(made.replay, batch, 0, Routing("record")):
                    made.scores(batch, 1.0)
        perturb_routers(made.replay, scale=0.3)
        logprobs: dict[tuple[int, int], float] = {}
        total = 0.0
        for batch in batches:
            with apply_routing(made.replay, batch, 0, ROUTINGS[mode]):
                scores = made.scores(batch, 0.7, entropy=False)
            assert scores.logprobs.dtype == torch.float64
            ratio = (scores.logprobs - batch.rollout_logprobs.double()).exp()
            loss = -(batch.loss_weights.double() * batch.advantages.double() * ratio).sum()
            backward(loss)
            total += loss.item()
            for number, value in zip(batch.sequence.tolist(), scores.logprobs.tolist(), strict=True):
                row = batch.trajectories[number].row
                logprobs[row, sum(key[0] == row for key in logprobs)] = value
    return Result(logprobs, total, gradients(made.model))


def assert_same(found: Result, expected: Result) -> None:
    assert found.logprobs.keys() == expected.logprobs.keys()
    for key, value in expected.logprobs.items():
        assert abs(found.logprobs[key] - value) < 1e-11, key
    assert abs(found.loss - expected.loss) < 1e-11
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=1e-11 * max(scale, 1.0), msg=name)


def num_shared(batches: Sequence[MicroBatch]) -> int:
    return sum(batch.layout.num_shared for batch in batches)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["off", "r2", "r3"])
def test_shared_prompts_give_the_same_log_probs_loss_and_gradients(mode: str, checkpointing: bool) -> None:
    made = Policy()
    if checkpointing:
        made.model.gradient_checkpointing_enable({"use_reentrant": False})
        made.model.train()
    trajectories = samples_of(GROUPS, observed=1)
    expected = trained(made, batches_of(made, trajectories, 40, None), mode)
    for budget in (1000, 20):
        batches = batches_of(made, trajectories, budget, Sharing(same_routes=mode == "r3"))
        assert num_shared(batches) > (50 if budget == 1000 else 10)
        assert_same(trained(made, batches, mode), expected)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    completions = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    count = len(completions)
    prompt = draw(st.integers(1, 12))
    differs = draw(st.lists(st.none() | st.integers(0, 11), min_size=count, max_size=count))
    continues = draw(st.lists(st.none() | st.integers(0, 3), min_size=count, max_size=count))
    return Group(prompt, tuple(completions), tuple(differs), tuple(continues))


@given(
    chosen=st.lists(groups(), min_size=1, max_size=3),
    coverage=st.sampled_from([0.0, 0.5, 1.0]),
    observed=st.integers(0, 2),
    mode=st.sampled_from(["off", "r2", "r3"]),
    budgets=st.tuples(st.integers(5, 90), st.integers(5, 90)),
)
@settings(max_examples=15)
def test_any_trees_in_any_micro_batches_have_the_gradient_of_the_whole_batch(
    chosen: list[Group], coverage: float, observed: int, mode: str, budgets: tuple[int, int]
) -> None:
    made, trajectories = policy(), samples_of(chosen, coverage, observed)
    apart = batches_of(made, trajectories, budgets[0], None)
    together = batches_of(made, trajectories, budgets[1], Sharing(same_routes=mode == "r3"))
    for batch in together:
        fed = batch.layout.num_rows
        assert fed <= budgets[1] or len(batch.trajectories) == 1
        assert fed + batch.layout.num_shared == batch.layout.num_tokens
    assert sorted(t.row for batch in together for t in batch.trajectories) == sorted(t.row for t in trajectories)
    assert_same(trained(made, together, mode), trained(made, apart, mode))


@pytest.mark.thorough
@given(
    chosen=st.lists(groups(), min_size=1, max_size=4),
    coverage=st.sampled_from([0.0, 0.5, 1.0]),
    observed=st.integers(0, 3),
    mode=st.sampled_from(["off", "r2", "r3"]),
    budget=st.integers(5, 120),
)
@settings(max_examples=300)
def test_many_trees_have_the_gradient_of_the_whole_batch(
    chosen: list[Group], coverage: float, observed: int, mode: str, budget: int
) -> None:
    made, trajectories = policy(), samples_of(chosen, coverage, observed)
    together = batches_of(made, trajectories, budget, Sharing(same_routes=mode == "r3"))
    assert_same(trained(made, together, mode), trained(made, batches_of(made, trajectories, 60, None), mode))


# ---- which tokens are shared -----------------------------------------------------------------------------------------


def prefixes_of(group: Group, *, same_routes: bool, coverage: float = 1.0) -> tuple[Prefix, ...]:
    (batch,) = batches_of(policy(), samples_of([group], coverage), 1000, Sharing(same_routes))
    return batch.layout.prefixes


def test_a_sample_with_other_routes_keeps_its_own_copy_from_there_on() -> None:
    group = Group(10, (3, 4, 5, 6), (None, 7, None, 7), (None,) * 4)
    assert prefixes_of(group, same_routes=False) == (Prefix(), Prefix(0, 10), Prefix(0, 10), Prefix(0, 10))
    assert prefixes_of(group, same_routes=True) == (Prefix(), Prefix(0, 7), Prefix(0, 10), Prefix(0, 7))


def test_the_next_turn_shares_the_turns_before_it_without_the_token_that_was_not_routed() -> None:
    group = Group(4, (3, 5, 2), (None,) * 3, (None, 0, 1))
    assert prefixes_of(group, same_routes=False) == (Prefix(), Prefix(0, 7), Prefix(1, 12))
    assert prefixes_of(group, same_routes=True) == (Prefix(), Prefix(0, 6), Prefix(1, 11))


def test_the_order_of_the_same_experts_does_not_matter() -> None:
    one, two = Group(6, (3, 4), (None,) * 2, (None,) * 2).samples(0, 1.0)
    reordered = mr.RouteTrace(
        two.token_ids, np.flip(two.trace.routed_experts, -1), LAYERS, two.trace.valid, num_experts=NUM_EXPERTS
    )
    (batch,) = batches_of(policy(), [one, replace(two, trace=reordered)], 100, Sharing(same_routes=True))
    assert batch.layout.prefixes == (Prefix(), Prefix(0, 6))
    assert num_differing(batch) == 0


def test_samples_whose_routes_differ_are_counted() -> None:
    group = Group(10, (3, 4, 5, 6), (None, 0, None, 7), (None,) * 4)
    trajectories = samples_of([group], 1.0)
    (batch,) = batches_of(policy(), trajectories, 1000, Sharing(same_routes=True))
    assert (num_differing(batch), batch.layout.num_shared) == (2, 17)
    (batch,) = batches_of(policy(), trajectories, 1000, Sharing(same_routes=False))
    assert (num_differing(batch), batch.layout.num_shared) == (0, 30)


def test_routes_that_differ_in_a_shared_prefix_are_not_replayed() -> None:
    trajectories = samples_of([Group(10, (3, 4), (None, 7), (None, None))], 1.0)
    (batch,) = batches_of(policy(), trajectories, 1000, Sharing(same_routes=False))
    with pytest.raises(AlignmentError, match=r"different routes in it.*sample 1, token 7.*Share no more"):
        captured_routes(batch, 0, batch.layout)
    whole = captured_routes(batch, 0, batch.layout.unshared)  # to be compared
    assert whole.num_rows == batch.layout.num_tokens


def test_recorded_routes_of_a_shared_prompt_are_those_of_every_sample() -> None:
    made, trajectories = policy(), samples_of(GROUPS[:1])
    made.restore()
    (batch,) = batches_of(made, trajectories, 1000, Sharing(same_routes=False))
    with torch.no_grad(), InFloat64(), made.replay.record() as recording:
        made.scores(batch, 1.0)
    traces = recording.traces(batch.layout, [t.token_ids.tolist() for t in batch.trajectories])
    assert all(trace.valid.all() for trace in traces)
    for trace in traces[1:]:
        assert np.array_equal(trace.routed_experts[:9], traces[0].routed_experts[:9])
    every = recording.batch().unshared(batch.layout)
    assert np.array_equal(every.routed_experts[0].numpy(), np.concatenate([t.routed_experts[:, 0] for t in traces]))


# ---- micro-batches -----------------------------------------------------------------------------------------------


def bins_of(groups: Sequence[Group], budget: int) -> tuple[list[list[sharing.Tree]], list[Trajectory]]:
    trajectories = samples_of(groups, 1.0)
    bodies = dict(enumerate(trajectories))
    return shared_bins(list(bodies), bodies, budget, Sharing(same_routes=True)), trajectories


def same(prompt: int, completion: int, samples: int) -> Group:
    return Group(prompt, (completion,) * samples, (None,) * samples, (None,) * samples)


def test_a_group_is_split_to_fill_micro_batches_where_that_makes_fewer() -> None:
    bins, trajectories = bins_of([same(2, 50, 8)] * 8, budget=800)  # a group has 402 tokens: two are a little too many
    costs = [sum(tree.cost for tree in bin_) for bin_ in bins]
    assert len(bins) == 5, costs  # 3,216 tokens; one for each group before
    assert sorted(costs)[1] > 700
    for tree in (tree for bin_ in bins for tree in bin_):
        assert sharing.tree_again(tree, dict(enumerate(trajectories)), 800, Sharing(True)) == tree
    bins, _ = bins_of([same(2, 50, 8)] * 2, budget=800)
    assert [[tree.cost for tree in bin_] for bin_ in bins] == [[402], [402]]  # two in any case


@pytest.mark.parametrize("mode", ["off", "r2", "r3"])
def test_groups_that_are_split_have_the_gradient_of_the_whole_batch(mode: str) -> None:
    made, trajectories = policy(), samples_of([same(2, 12, 4)] * 4)
    batches = batches_of(made, trajectories, 90, Sharing(same_routes=False))
    assert len(batches) == 3  # of 50 tokens a group: one for each before
    assert_same(trained(made, batches, mode), trained(made, batches_of(made, trajectories, 60, None), mode))


@given(group=groups(), limit=st.integers(1, 60))
def test_a_group_is_split_without_loss(group: Group, limit: int) -> None:
    ((tree,),), trajectories = bins_of([group], 1000)
    bodies = dict(enumerate(trajectories))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "TOKENS_PER_COPIED", 0)  # whatever is copied
        parts = sharing._split(tree, limit, bodies, 1000, Sharing(same_routes=True)) if limit < tree.cost else []
    assert [i for part in parts for i in part.indices] in ([], tree.indices)
    for part in parts:
        assert sharing.tree_again(part, bodies, 1000, Sharing(same_routes=True)) == part
    assert not parts or parts[0].cost <= limit


def test_a_group_is_not_split_where_that_costs_long_copies_of_its_prompt() -> None:
    bins, _ = bins_of([same(200, 25, 8)] * 8, budget=700)
    assert [[len(tree.indices) for tree in bin_] for bin_ in bins] == [[8]] * 8


@given(chosen=st.lists(groups(), min_size=1, max_size=6), budget=st.integers(5, 60))
def test_micro_batches_have_every_sample_once_within_the_budget(chosen: list[Group], budget: int) -> None:
    bins, trajectories = bins_of(chosen, budget)
    assert sorted(i for bin_ in bins for tree in bin_ for i in tree.indices) == list(range(len(trajectories)))
    for bin_ in bins:
        assert sum(tree.cost for tree in bin_) <= budget or [len(tree.indices) for tree in bin_] == [1]
        for tree in bin_:
            again = sharing.tree_again(tree, dict(enumerate(trajectories)), max(budget, tree.cost), Sharing(True))
            assert (again.indices, again.prefixes, again.cost) == (tree.indices, tree.prefixes, tree.cost)


# ---- ranks -----------------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30),
    ranks=st.integers(1, 6),
    budget=st.integers(1, 200),
)
def test_groups_are_divided_over_ranks_without_loss(sizes: list[tuple[int, int, int]], ranks: int, budget: int) -> None:
    headers = [header(group, prompt, completion) for group, prompt, completion in sizes]
    shares = divide_groups(headers, ranks, budget)
    assert len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))


def header(group: int, prompt: int, completion: int) -> TrajectoryHeader:
    return TrajectoryHeader(
        row=group, group=group, length=prompt + completion, num_scored=completion, reward=1.0, advantage=0.0, oldest=0,
        newest=0, truncated=False,
    )  # fmt: skip


def test_a_group_stays_on_one_rank_unless_another_would_have_nothing_to_do() -> None:
    headers = [header(i // 4, 100, 20) for i in range(16)]
    assert sorted(divide_groups(headers, 4, 1000)) == [[4 * i + j for j in range(4)] for i in range(4)]
    halves = divide_groups(headers[:8], 4, 1000)
    assert sorted(len(share) for share in halves) == [2, 2, 2, 2]
    assert all(len({headers[i].group for i in share}) == 1 for share in halves)
