"""Kernels of a training step on a GPU: attention, experts and head in bfloat16 against float32; resumed runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.policy import all_weights, save_state

pytest.importorskip("transformers", minversion="5.0")

import moe_replay as mr
from moe_replay.records import FinishReason, Trajectory
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.trace import RouteTrace
from moe_replay.train.backends import experts
from moe_replay.train.backends.attention import forward_arguments, use_attention
from moe_replay.train.backends.compilation import CompiledLayers
from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.backends.logprobs import EAGER, Head, HeadMath, head_logprobs
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.learn.learner import Learner
from moe_replay.train.setup import launch
from tests.gpu.models import FAMILIES, VOCABULARY, random_model
from tests.train.trajectories import stored

DEVICE = torch.device("cuda")
HALF = torch.bfloat16
LENGTHS = (37, 90, 64, 12)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def sequences(seed: int = 0) -> list[Tensor]:
    tokens = torch.randint(2, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))
    return list(tokens.split(LENGTHS))


def outcome(model: Any, logits: list[Tensor]) -> dict[str, Tensor]:
    """Return log-probs (tokens, V) of all sequences, and the gradient of a weighted sum of those of the next tokens."""
    logprobs = torch.cat(logits).float().log_softmax(-1)
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1)).to(logprobs.device)
    model.zero_grad()
    (logprobs * weights).sum().backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return {"log-probs": logprobs.detach()} | gradients


def alone(model: Any, routes: list[RouteBatch] | None) -> tuple[dict[str, Tensor], list[RouteTrace]]:
    """Run each sequence alone, with routes replayed or recorded."""
    replay, logits, traces = mr.attach(model), [], []
    for number, ids in enumerate(sequences()):
        with replay.record() if routes is None else replay.replay(routes[number]) as run:
            logits.append(model(input_ids=ids[None].to(DEVICE), use_cache=False).logits[0])
        if routes is None:
            traces += run.traces(TokenLayout.packed([len(ids)]), [ids.numpy()])
    result = outcome(model, logits)
    replay.detach()
    return result, traces


def packed(model: Any, traces: list[RouteTrace]) -> dict[str, Tensor]:
    """Run all sequences in one row, with the routes of the traces."""
    layout, replay = TokenLayout.packed(LENGTHS), mr.attach(model)
    ids = torch.cat(sequences())[None].to(DEVICE)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(DEVICE)
    with replay.replay(RouteBatch.from_traces(traces, layout, replay.layers).to(DEVICE)):
        logits = model(
            input_ids=ids, position_ids=positions, use_cache=False, **forward_arguments(model, layout, DEVICE)
        ).logits[0]
    result = outcome(model, [logits])
    replay.detach()
    return result


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of the log-probs and of the whole gradient."""
    names = [name for name in expected if name != "log-probs"]
    assert found.keys() == expected.keys()
    difference = sum(float((found[name] - expected[name]).square().sum()) for name in names)
    size = sum(float(expected[name].square().sum()) for name in names)
    logprobs = float((found["log-probs"] - expected["log-probs"]).abs().mean())
    return {"log-probs": logprobs, "gradient": (difference / size) ** 0.5}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_as_close_to_float32_as_eager_sequences(family: str) -> None:
    """All with the routes of the float32 model: attention, experts and rounding are what differs."""
    reference = random_model(family, torch.float32).to(DEVICE).train()
    reference.set_attn_implementation("eager")
    expected, traces = alone(reference, None)
    layers = mr.attach(reference).layers
    routes = [RouteBatch.from_traces([one], TokenLayout.packed([len(one)]), layers).to(DEVICE) for one in traces]
    eager = random_model(family, HALF).to(DEVICE).train()
    eager.set_attn_implementation("eager")
    eager.set_experts_implementation("eager")
    usual = errors(alone(eager, routes)[0], expected)
    model = random_model(family, HALF).to(DEVICE).train()
    use_attention(model, "auto", DEVICE, HALF, log=False)
    experts.use_experts(model, DEVICE, log=False)
    found = errors(packed(model, traces), expected)
    print(f"{family}: {model.config._attn_implementation}, {model.config._experts_implementation}: {found}, {usual}")
    assert model.config._attn_implementation in ("varlen", "flex")
    for kind, limit in usual.items():
        assert found[kind] <= 1.5 * limit + 1e-5, kind


def test_the_head_compiled_is_the_head() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(*shape, generator=generator).to(DEVICE, HALF).requires_grad_() for shape in ((700, 64), (5000, 64))
    )
    targets = torch.randint(5000, (700,), generator=generator).to(DEVICE)
    layers = CompiledLayers()
    results = []
    for math in (EAGER, HeadMath(*map(layers.function, EAGER))):
        logprobs, entropy = head_logprobs(hidden, Head(weight), targets, temperature=0.8, chunk=256, math=math)
        results.append([logprobs, entropy, *torch.autograd.grad(logprobs.sum(), [hidden, weight])])
    assert layers.failure is None
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-4)


# ---- runs ------------------------------------------------------------------------------------------------------------


@contextmanager
def policy(folder: Path) -> Iterator[tuple[FsdpBackend, Learner]]:
    settings = {
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "data": {"path": "unused"},
        "replay": {"mode": "r2", "deterministic": True},
        "backend": {"device": DEVICE.type},
        "batch": {"tokens_per_micro_batch": 128},
        "optim": {"lr": 1e-3},
        "server_checks": {"action": "warn"},  # the log-probs of the rollout are made up
    }
    config = TrainConfig.model_validate(settings)
    backend = FsdpBackend(config, str(folder), DEVICE)
    try:
        yield backend, Learner(config, backend)
    finally:
        backend.close()


def steps(learner: Learner, count: int, topology: Any) -> None:
    for step in range(count):
        trajectories = []
        for row, ids in enumerate(sequences(seed=step)):
            trace = RouteTrace.uncovered(
                ids.numpy().astype(np.int32), topology.layers, topology.top_k, num_experts=topology.num_experts
            )
            versions = np.where(np.arange(len(ids)) < len(ids) // 2, -1, 0)
            trajectories.append(
                Trajectory(
                    row=row,
                    group=row // 2,
                    token_ids=trace.token_ids,
                    logprobs=np.full(len(ids), -6.0, np.float32),
                    versions=versions,
                    trace=trace,
                    finish_reason=FinishReason.STOP,
                    reward=float(row % 2),
                    advantage=float(row % 2) - 0.5,
                )
            )
        metrics = learner.new_metrics()
        updates = learner.prepare(*stored(trajectories))
        learner.score(updates, metrics, step=step + 1)
        learner.update(updates, metrics, step=step + 1)


def weights(backend: FsdpBackend) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in all_weights(backend)}


def test_a_resumed_run_is_bit_for_bit_the_same(tmp_path: Path) -> None:
    """The state of the fused optimizer included."""
    model = random_model("qwen3_moe", HALF)
    model.save_pretrained(tmp_path / "model")
    with launch.process_group(DEVICE):
        with policy(tmp_path / "model") as (backend, learner):
            begun = weights(backend)
            steps(learner, 2, backend.topology)
            save_state(backend, tmp_path / "state")
            steps(learner, 2, backend.topology)
            expected = weights(backend)
        with policy(tmp_path / "model") as (backend, learner):
            backend.load(tmp_path / "state")
            steps(learner, 2, backend.topology)
            found = weights(backend)
    assert any(not torch.equal(begun[name], tensor) for name, tensor in expected.items()), "nothing was trained"
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
