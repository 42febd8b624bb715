"""Gathered weights that are kept up to the optimizer step: the same run bit for bit, with fewer gathers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.loop import train
from tests.train.test_old_logprobs import assert_same_run


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each time that weights of a layer, or of the root, are gathered or, on one rank, cast."""
    calls: list[int] = []
    gather = FSDPParamGroup._to_unsharded

    def counted(self: FSDPParamGroup) -> None:
        calls.extend([1] * (not self.is_unsharded))
        gather(self)

    monkeypatch.setattr(FSDPParamGroup, "_to_unsharded", counted)
    return calls


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_run_is_the_same_with_fewer_gathers(
    config: Callable[..., Any], metrics_of: Callable[[Path], Any], gathers: list[int], recomputed: bool
) -> None:
    """Scored, updated twice a step in several micro-batches, with a native pass in each step."""
    runs, counts = {}, {}
    for resharded in (True, False):
        runs[resharded] = train(
            config(
                str(resharded),
                steps=3,
                model={"gradient_checkpointing": recomputed},
                backend={"reshard_after_forward": resharded},
                replay={"mode": "r3"},
                algorithm={"updates_per_rollout": 2, "old_logprobs": "always"},
                batch={"tokens_per_micro_batch": 32},
            )
        )
        counts[resharded] = len(gathers)
        gathers.clear()
    assert metrics_of(runs[False]) == metrics_of(runs[True])
    assert_same_run(runs[False], runs[True], step=3)
    assert counts[False] < counts[True] / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_adds_up_gradients_before_it_copies_them(
    config: Callable[..., Any], metrics_of: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The same sums in the same order, in float32."""
    runs, reductions = {}, {}
    update = FsdpBackend.update
    counted: list[int] = []

    def scattered(*args: Any, **rest: Any) -> Any:
        counted.append(1)
        return scatter(*args, **rest)

    scatter = _fsdp_param_group.foreach_reduce
    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", scattered)
    for is_alone in (False, True):

        def one_update(self: FsdpBackend, *args: Any, alone: bool = is_alone, **rest: Any) -> Any:
            self._is_alone = alone
            return update(self, *args, **rest)

        monkeypatch.setattr(FsdpBackend, "update", one_update)
        runs[is_alone] = train(
            config(str(is_alone), steps=2, model={"dtype": dtype}, batch={"tokens_per_micro_batch": 32})
        )
        reductions[is_alone] = len(counted)
        counted.clear()
    assert metrics_of(runs[True]) == metrics_of(runs[False])
    assert_same_run(runs[True], runs[False], step=2)
    assert 0 < reductions[True] < reductions[False]
