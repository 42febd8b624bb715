"""What a rank does with a backend: two updates on trajectories whose routes are those of another model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import moe_replay as mr
from moe_replay.distributed.collectives import broadcast_bytes
from moe_replay.records import FinishReason, MicroBatch, RolloutBatch, Trajectory
from moe_replay.train.backends.base import Backend, Routing, Scores, UpdateResult, keep_rollout_routes
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.learn.balance import ExpertBalance
from moe_replay.train.learn.batches import layers_of, mini_batches
from moe_replay.train.learn.losses import LossInputs, LossSettings, clipped_surrogate
from moe_replay.train.trajectories.store import RankStore, TrajectoryStore
from moe_replay.train.trajectories.wire import (
    batch_from_bytes,
    batch_to_bytes,
)
from tests.megatron.weights.models import VOCABULARY, save_checkpoint, tiny
from tests.models import perturb_routers
from tests.support.policy import all_weights, save_state
from tests.support.trajectory_bytes import trajectories_from_bytes, trajectories_to_bytes
from tests.train.trajectories import random_mask, stored

LENGTHS = (9, 14, 5, 11, 7, 12, 6, 10)
PROMPT = 3
UPDATES = 2
LEARNING_RATE = 0.05
BUDGET = 24  # so that there are several micro-batches of different widths
LOGIT_CHUNK = 5  # so that log-probs come in several slices

REPLAY = Routing("replay", "rollout", observe=True)

Routes = Literal["recorded", "gap", "engine"]
"""Replayed ones: recorded; on the last rank without one row in one layer; the rollout's without last tokens."""

# ---- the whole model ------------------------------------------------------------------------------------------------


def save_policy(folder: Path, variant: str = "qwen3_moe", lengths: Sequence[int] = LENGTHS) -> bytes:
    """A checkpoint, and trajectories sampled by the same model with other routers."""
    model: Any = tiny(variant)
    save_checkpoint(model, folder)
    replay = mr.attach(model)
    perturb_routers(replay, scale=0.7)
    random = np.random.default_rng(0)
    made = []
    for number, length in enumerate(lengths):
        ids = random.integers(1, VOCABULARY, length)
        grid = torch.from_numpy(ids)[None]
        with torch.no_grad(), replay.record() as recording:
            logprobs = model(grid).logits[0, :-1].log_softmax(-1).gather(1, grid[0, 1:, None])[:, 0]
        (trace,) = recording.traces(mr.TokenLayout.padded([length]), [ids])
        sampled = np.arange(length) >= PROMPT
        made.append(
            Trajectory(
                row=number,
                group=number // 4,
                token_ids=ids.astype(np.int32),
                logprobs=np.where(sampled, np.append(0.0, logprobs), 0.0).astype(np.float32),
                versions=np.where(sampled, 0, -1),
                trace=trace,
                finish_reason=FinishReason.STOP,
                reward=1.0,
                advantage=float(random.normal()),
            )
        )
    return trajectories_to_bytes(made)


def without_last_routes(data: bytes) -> bytes:
    """The trajectories with the routes that an engine returns: none for the last token."""
    made = []
    for one in trajectories_from_bytes(data):
        trace, valid = one.trace, one.trace.valid.copy()
        valid[-1] = False
        ids = (trace.token_ids, trace.routed_experts, trace.layers)
        made.append(replace(one, trace=mr.RouteTrace(*ids, valid, num_experts=trace.num_experts)))
    return trajectories_to_bytes(made)


def with_masks(data: bytes) -> bytes:
    """The trajectories with random supports for their sampled tokens."""
    made = [replace(one, sampling_mask=random_mask(one, VOCABULARY, one.row)) for one in trajectories_from_bytes(data)]
    return trajectories_to_bytes(made)


# ---- on a rank ------------------------------------------------------------------------------------------------------


def make_config(folder: str, kind: str = "megatron", **settings: Any) -> TrainConfig:
    """A float32 run with these settings of its backend; `dtype`, `packed` and `beta` are of other sections."""
    dtype, packed, beta = settings.pop("dtype", "float32"), settings.pop("packed", False), settings.pop("beta", 0.0)
    return TrainConfig.model_validate(
        {
            "model": {"path": folder, "dtype": dtype, "attn_implementation": "eager"},
            "data": {"path": "prompts.jsonl"},
            "rollout": {"temperature": 1.3},
            "backend": {"kind": kind, "device": "cpu", **settings},
            "optim": {"lr": LEARNING_RATE, "eps": 1e-2, "weight_decay": 0.1, "max_grad_norm": 2.0},
            "batch": {"packed": packed, "tokens_per_micro_batch": BUDGET, "logit_chunk": LOGIT_CHUNK},
            "algorithm": {"beta": beta},
        }
    )


def open_backend(config: TrainConfig) -> Backend:
    """The backend that the config names."""
    from moe_replay.train.backends.fsdp import FsdpBackend
    from moe_replay.train.backends.megatron import MegatronBackend

    torch.backends.mkldnn.set_flags(False)  # its bfloat16 is slow and talkative on small CPUs
    kind = MegatronBackend if config.backend.kind == "megatron" else FsdpBackend
    return kind(config, config.model.path, torch.device("cpu"))


def batches_of(
    backend: Backend,
    data: bytes,
    packed: bool,
    balance: ExpertBalance | None = None,
    source: tuple[RolloutBatch, TrajectoryStore] | None = None,
) -> list[list[MicroBatch]]:
    """The micro-batches of this rank for each update."""
    made = mini_batches(
        *(stored(trajectories_from_bytes(data)) if source is None else source),
        backend,
        updates=UPDATES,
        aggregation="seq_mean_token_mean",
        max_tokens=16,
        budget=BUDGET,
        packed=packed,
        balance=balance,
    )
    for batch in (batch for mini in made for batch in mini):
        keep_rollout_routes(batch, backend.chunk_layers)
    return made


def loss_sum(total: list[float]) -> Callable[[MicroBatch, Tensor], Tensor]:
    """A policy loss that adds what it is to `total`."""

    def loss(batch: MicroBatch, logprobs: Tensor) -> Tensor:
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=batch.rollout_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
            weights=batch.loss_weights,
            sequence=batch.sequence,
            num_sequences=len(batch.trajectories),
        )
        found = clipped_surrogate(
            inputs, LossSettings(importance_sampling_level="sequence", clip_low=1.0, clip_high=100.0)
        ).loss
        total[-1] += found.item()
        return found

    return loss


def two_updates(folder: str, data: bytes, kind: str = "megatron", settings: dict[str, Any] | None = None) -> dict:
    """Replay the routes of the trajectories: losses, norms, log-probs of each sequence before, weights after."""
    config = make_config(folder, kind, **(settings or {}))
    backend = open_backend(config)
    minis = batches_of(backend, data, config.batch.packed)
    scores = [backend.score(mini, REPLAY) for mini in minis]
    for seen, unseen in zip(scores[0], backend.score(minis[0], Routing("replay", "rollout")), strict=True):
        assert (seen is unseen is None) or torch.equal(seen.logprobs, unseen.logprobs), "observing changes a pass"
    native = [backend.score(mini, Routing()) for mini in minis]
    losses: list[float] = []
    updates = [
        _counted_update(backend, mini, losses, Routing("replay", "rollout", observe=number == 0))
        for number, mini in enumerate(minis)
    ]
    for batch in (batch for mini in minis for batch in mini):
        observed = tuple(batch.native_routes[chunk].layers for chunk in range(len(backend.chunk_layers)))
        assert observed == backend.chunk_layers
    exported = {name: tensor.clone() for name, tensor in all_weights(backend)}
    backend.close()
    return {
        "losses": losses if backend.reports_metrics else [0.0] * len(minis),
        "norms": [updated.grad_norm for updated in updates],
        "replayed": by_row(backend, minis, scores),
        "native": by_row(backend, minis, native),
        "micro_batches": [len(mini) for mini in minis],
        "weights": exported if dist.get_rank() == 0 else {},
    }


class CountFound(TorchDispatchMode):
    """Counts collectives that gather whole numbers, operations that find or sort what is true, and cuts by expert."""

    gathers = orders = cuts = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, aten = function.overloadpacket, torch.ops.aten
        self.gathers += "c10d._allgather_base" in str(function) and args[0].dtype == torch.int64
        self.orders += packet is aten.masked_select or (packet is aten.sort and args[0].dtype == torch.bool)
        self.cuts += packet is aten.split_with_sizes and len(args[1]) == 8  # experts
        return function(*args, **(kwargs or {}))


def known_counts(folder: str, data: bytes, settings: dict[str, Any], routes: Routes) -> list[dict[str, Any]]:
    """Score and update with replayed routes, with plans and without: values, gathers, orders, micro-batches, ..."""
    data = without_last_routes(data) if routes == "engine" else data
    found = []
    for plans_rows in (True, False):
        backend: Any = open_backend(make_config(folder, **settings))
        backend.replay.plans_rows = plans_rows
        mini = batches_of(backend, data, settings.get("packed", False))[0]
        backend.score(mini, Routing("record"))
        if routes == "gap" and dist.get_rank() == dist.get_world_size() - 1:
            whole = mini[0].recorded_routes[0]
            valid = whole.valid.clone()
            valid[0, 1] = False
            all_valid = (False, *whole.all_valid[1:])
            mini[0].recorded_routes[0] = replace(whole, valid=valid, all_valid=all_valid)
        routing, losses = Routing("replay", "rollout" if routes == "engine" else "recorded"), []
        with CountFound() as count:
            scores = backend.score(mini, routing)
            norm = _counted_update(backend, mini, losses, routing).grad_norm
        values = {name: tensor.clone() for name, tensor in all_weights(backend)}
        values |= {f"scores {i}": one.logprobs for i, one in enumerate(scores) if one is not None}
        found.append({"values": values, "numbers": (norm, losses), "gathers": count.gathers, "orders": count.orders})
        found[-1]["cuts"] = count.cuts
        chunks = sum(map(bool, backend.chunk_layers))
        found[-1] |= {"batches": len(mini), "layers": len(backend.replay.layers), "chunks": chunks}
        backend.close()
    return found


def _counted_update(
    backend: Backend, mini: list[MicroBatch], losses: list[float], routing: Routing = REPLAY
) -> UpdateResult:
    losses.append(0.0)
    updated = backend.update(mini, loss_sum(losses), routing, lr=LEARNING_RATE)
    assert updated.applied
    return updated


def by_row(backend: Backend, minis: list[list[MicroBatch]], scores: list[list[Scores | None]]) -> dict[int, Tensor]:
    """(2, N) of each sequence that this rank reports: log-probs and entropy."""
    found = {}
    for batch, of in zip(chain(*minis), chain(*scores), strict=True):
        assert (of is not None) or not backend.reports_metrics
        if of is not None and backend.reports_metrics and not batch.is_dummy:
            for number, one in enumerate(batch.trajectories):
                assert one.row not in found, "a sequence is trained on twice"
                found[one.row] = torch.stack([of.logprobs, of.entropy])[:, batch.sequence == number].clone()
    return found


def balanced_update(folder: str, data: bytes, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Losses and norms of two updates by tokens and by the load of experts, and which rows are trained together."""
    config = make_config(folder, kind, **settings)
    outcome: dict[str, Any] = {}
    for name in ("tokens", "experts"):
        backend = open_backend(config)
        balance = ExpertBalance(backend) if name == "experts" else None
        store = RankStore(backend.data_rank, layers_of(backend), 60.0, machine=f"machine-{dist.get_rank() % 2}")
        put = batch_to_bytes(store.put(trajectories_from_bytes(data))) if dist.get_rank() == 0 else None
        batch = batch_from_bytes(broadcast_bytes(put))
        minis = batches_of(backend, data, config.batch.packed, balance, (batch, store))
        scores = by_row(backend, minis, [backend.score(mini, REPLAY) for mini in minis])
        losses: list[float] = []
        norms = [_counted_update(backend, mini, losses).grad_norm for mini in minis]
        outcome[name] = {
            "losses": losses if backend.reports_metrics else [0.0] * len(minis),
            "norms": norms,
            "scores": scores,
            "rows": [[[t.row for t in batch.trajectories if not batch.is_dummy] for batch in mini] for mini in minis],
            "weights": {name: tensor.clone() for name, tensor in all_weights(backend)},
            "metrics": {} if balance is None else balance.metrics,
            "exchange": tuple(backend.expert_exchange or ()),
            "data_rank": backend.data_rank,
        }
        dist.barrier()  # rank 0 serves until every rank has what it trains on
        store.close()
        backend.close()
    return outcome


def first_ratios(folder: str, data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
    """R2: record in the old-log-prob pass, replay in the update: log-ratios before the first and the second step."""
    config = make_config(folder, **settings)
    backend = open_backend(config)
    batches = batches_of(backend, data, config.batch.packed)[0]
    for batch, scores in zip(batches, backend.score(batches, Routing("record")), strict=True):
        batch.old_logprobs = None if scores is None else scores.logprobs
    apart: list[float] = []

    def loss(batch: MicroBatch, logprobs: Tensor) -> Tensor:
        assert batch.old_logprobs is not None
        apart[-1] = max(apart[-1], (logprobs - batch.old_logprobs).abs().max().item())
        return (logprobs * batch.advantages * batch.loss_weights).sum()

    for _ in range(2):
        apart.append(0.0)
        assert backend.update(batches, loss, Routing("replay", "recorded"), lr=LEARNING_RATE).applied
    return {"apart": apart, "reports_metrics": backend.reports_metrics}


def saved_between(folder: str, data: bytes, settings: dict[str, Any], saved: str) -> dict[str, Tensor]:
    """The weights after two updates in one go; what there was between them is saved."""
    config = make_config(folder, **settings)
    backend = open_backend(config)
    minis = batches_of(backend, data, config.batch.packed)
    _counted_update(backend, minis[0], [])
    save_state(backend, Path(saved))
    _counted_update(backend, minis[1], [])
    weights = {name: tensor.clone() for name, tensor in all_weights(backend)}
    backend.close()
    return weights


def stop_and_go_on(folder: str, data: bytes, settings: dict[str, Any], saved: str) -> dict[str, Any]:
    """The weights after two updates in one go, and with all of it saved, thrown away and loaded between them."""
    at_once = saved_between(folder, data, settings, saved)
    config = make_config(folder, **settings)
    again = open_backend(config)
    again.score(batches_of(again, data, config.batch.packed)[0], REPLAY)  # as the probe does before a run resumes
    again.load(Path(saved))
    _counted_update(again, batches_of(again, data, config.batch.packed)[1], [])
    later = {name: tensor.clone() for name, tensor in all_weights(again)}
    return {
        "different": [name for name in at_once if not torch.equal(at_once[name], later[name])],
        "bytes": again.state_bytes(),
    }


def go_on(folder: str, data: bytes, settings: dict[str, Any], saved: str, again: str) -> dict[str, Any]:
    """Load what other ranks saved after the first of two updates, save it again, and make the second one."""
    config = make_config(folder, **settings)
    backend = open_backend(config)
    minis = batches_of(backend, data, config.batch.packed)
    backend.load(Path(saved))
    save_state(backend, Path(again))
    _counted_update(backend, minis[1], [])
    weights = {name: tensor.clone() for name, tensor in all_weights(backend)}
    backend.close()
    return {"weights": weights if dist.get_rank() == 0 else {}}


def refusals(folder: str, settings: dict[str, Any], saved: str) -> list[str]:
    """What loading says of a state of another layout, of a folder without one, and of one with pickled files."""
    from moe_replay.train.backends.rank_state import SavedStateError

    backend = open_backend(make_config(folder, tensor_parallel=2))
    save_state(backend, Path(saved))
    pickled = Path(saved, "pickled")
    save_state(backend, pickled)
    (pickled / ".metadata").touch()
    backend.close()
    other = open_backend(make_config(folder, **settings))
    before = [tensor.clone() for _, tensor in all_weights(other)]
    said = []
    for path in (Path(saved), Path(saved, "nothing"), pickled):
        try:
            other.load(path)
        except SavedStateError as error:
            said.append(str(error))
    assert all(torch.equal(old, now) for old, (_, now) in zip(before, all_weights(other), strict=True))
    return said


def bad_update(folder: str, data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
    """Weights after two good updates, with a third between them whose loss is NaN on some ranks, and without it."""
    config = make_config(folder, **settings)

    def trained(*, with_bad: bool) -> tuple[dict[str, Tensor], UpdateResult | None]:
        backend = open_backend(config)
        minis = batches_of(backend, data, config.batch.packed)
        _counted_update(backend, minis[0], [])
        worth = float("nan") if backend.data_rank == 0 else 1.0
        bad = (
            backend.update(minis[1], lambda _, found: found.sum() * worth, REPLAY, LEARNING_RATE) if with_bad else None
        )
        _counted_update(backend, minis[1], [])
        exported = {name: tensor.clone() for name, tensor in all_weights(backend)}
        backend.close()
        return exported, bad

    (found, bad), (wanted, _) = trained(with_bad=True), trained(with_bad=False)
    assert bad is not None
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    return {"applied": bad.applied, "norm": bad.grad_norm, "different": different}


def reference_scores(folder: str, data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
    """Of the reference model before and after an update of the policy, and of the policy before it."""
    config = make_config(folder, beta=0.1, **settings)
    backend = open_backend(config)
    mini = batches_of(backend, data, config.batch.packed)[0]
    policy = backend.score(mini, Routing())
    before = backend.score_reference(mini)
    _counted_update(backend, mini, [])
    after, moved = backend.score_reference(mini), backend.score(mini, Routing())
    pairs = [
        (torch.equal(old, one.logprobs) and torch.equal(old, new), torch.equal(new, now.logprobs))
        for one, old, new, now in zip(policy, before, after, moved, strict=True)
        if one is not None and old is not None and new is not None and now is not None
    ]
    return {"kept": all(same for same, _ in pairs), "moved": not any(same for _, same in pairs), "scored": len(pairs)}
