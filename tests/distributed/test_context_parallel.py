"""Replay under context parallelism: each rank has a share of every sequence, and the routes of that share."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import moe_replay as mr
from tests.combinations import with_whole_runs
from tests.distributed.attention import use_gathered_attention, visible
from tests.distributed.harness import run_ranks
from tests.distributed.rank import CHECKPOINTING, Share, record_and_replay
from tests.distributed.reference import (
    Outcome,
    check_other,
    check_same,
    data_parallel,
    forward_arguments,
    from_wire,
    one_process,
    recorded_traces,
    rollout_traces,
    to_wire,
)
from tests.replay.adapters.families import tiny_model

SEED = 0


# ---- on a rank -------------------------------------------------------------------------------------------------------


def layouts_of_all_ranks(collator: str, style: Any, routes: list[bytes]) -> list[mr.TokenLayout]:
    lengths, size = [len(trace) for trace in from_wire(routes)], dist.get_world_size()
    if collator == "packed":
        whole = mr.TokenLayout.packed(lengths, pad_each_to_multiple_of=2 * size)
    else:
        whole = mr.TokenLayout.padded(lengths, side="left").pad_to(multiple_of=2 * size)
    return [whole.context_parallel(rank, size, style) for rank in range(size)]


def on_rank(family: str, collator: str, style: str, routes: list[bytes]) -> tuple:
    model = tiny_model(family).train()
    use_gathered_attention(model)
    layouts = layouts_of_all_ranks(collator, style, routes)
    mine = layouts[dist.get_rank()]
    return record_and_replay(model, mine, routes, attention_mask=visible(mine, layouts))


def feed_zigzag_with_contiguous_routes(collator: str, routes: list[bytes]) -> tuple[str, bool]:
    """What the error says, and whether the first layer ran."""
    model = tiny_model("qwen3_moe")
    use_gathered_attention(model)
    replay, rank, traces = mr.attach(model), dist.get_rank(), from_wire(routes)
    began = []
    model.model.embed_tokens.register_forward_pre_hook(lambda *_: began.append(True))
    fed = layouts_of_all_ranks(collator, "zigzag", routes)
    cut = layouts_of_all_ranks(collator, "contiguous", routes)[rank]
    arguments = forward_arguments(fed[rank], [trace.token_ids for trace in traces])
    with (
        pytest.raises(mr.AlignmentError) as refused,
        replay.replay(mr.RouteBatch.from_traces(traces, cut)),
    ):
        model(**arguments | {"attention_mask": visible(fed[rank], fed)})
    return str(refused.value), bool(began)


# ---- all ranks together ----------------------------------------------------------------------------------------------


def summed(outcomes: list[Outcome]) -> Outcome:
    return Outcome([sum(outcome.losses[0] for outcome in outcomes)], data_parallel(outcomes, 1).gradients)


def check_shares(family: str, size: int, collator: str, style: str) -> None:
    routes = to_wire(rollout_traces(family, SEED))
    shares = [Share.received(parts) for parts in run_ranks(size, on_rank, family, collator, style, routes)]

    recorded = [from_wire(share.recorded) for share in shares]
    assert any(trace.covered_fraction < 1 for trace in recorded[0]), "one rank alone has not seen every token"
    merged = [mr.RouteTrace.merge(of_one_sequence) for of_one_sequence in zip(*recorded, strict=True)]
    assert merged == recorded_traces(family, SEED)

    expected = one_process(family, SEED)
    for checkpoint in CHECKPOINTING:
        check_same(summed([share.replayed[checkpoint] for share in shares]), expected)
    check_other(summed([share.native for share in shares]), expected)


@pytest.mark.parametrize("collator", ["padded", "packed"])
@pytest.mark.parametrize(
    ("family", "size"), with_whole_runs([("qwen3_moe", 2), ("deepseek_v3", 2), ("glm4_moe", 4)], [("glm4_moe", 4)])
)
def test_zigzag(family, size, collator):
    check_shares(family, size, collator, "zigzag")


@pytest.mark.parametrize("collator", ["padded", "packed"])
def test_contiguous(collator):
    check_shares("qwen3_moe", 2, collator, "contiguous")


@pytest.mark.parametrize("collator", ["padded", "packed"])
def test_routes_cut_otherwise_than_the_tokens_are_refused(collator):
    routes = to_wire(rollout_traces("qwen3_moe", SEED))
    for message, began in run_ranks(2, feed_zigzag_with_contiguous_routes, collator, routes):
        assert "the model is fed another token than the routes belong to" in message
        assert "token id" in message
        assert not began
