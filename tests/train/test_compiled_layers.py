"""Layers compiled one by one: the same numbers, few graphs whatever the lengths, and eager code where that fails."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import moe_replay as mr
from moe_replay.errors import ReplayStateError
from moe_replay.routes.layout import TokenLayout
from moe_replay.train.backends import attention, compilation, fsdp
from moe_replay.train.backends.attention import forward_arguments, use_attention
from moe_replay.train.backends.compilation import CompiledLayers, graphs_compiled
from moe_replay.train.loop import train
from tests.models import gradients, perturb_routers, random_ids, tiny_qwen3_moe

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
HEAD_GRAPHS = 4
LENGTHS = [(5, 9), (7, 3, 6), (20,), (4, 4, 4, 4, 4), (30, 2)]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def traced_kernel(q, k, v, starts, key_starts, longest, most_keys, *, scale, window_size, enable_gqa):
    """`varlen_attn` as operations that a compiler can trace; queries are the last tokens of their keys."""
    place, key = torch.arange(q.shape[0]), torch.arange(k.shape[0])
    sequence, of_key = (
        torch.bucketize(rows, ends[1:], right=True) for rows, ends in ((place, starts), (key, key_starts))
    )
    own = place + (key_starts - starts)[1:][sequence]
    visible = (sequence[:, None] == of_key) & (own[:, None] >= key)
    k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], 1) for heads in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Layers that are recomputed in the backward."""
    monkeypatch.setattr(attention, "varlen_kernel", lambda: traced_kernel)
    monkeypatch.setattr(attention, "varlen_shares_heads", lambda: True)
    made = tiny_qwen3_moe(num_hidden_layers=3, mlp_only_layers=[], experts_implementation="batched_mm").train()
    use_attention(made, "varlen", CPU, torch.float32, log=False)
    made.gradient_checkpointing_enable({"use_reentrant": False})
    return made


def forward(model: Any, lengths: tuple[int, ...]) -> Callable[[], Tensor]:
    layout = TokenLayout.packed(lengths)
    ids, positions = random_ids(1, sum(lengths), seed=sum(lengths)), torch.cat([torch.arange(n) for n in lengths])[None]
    arguments = forward_arguments(model, layout, CPU)
    return lambda: model(input_ids=ids, position_ids=positions, use_cache=False, **arguments).logits


def test_layers_share_graphs_in_all_passes_whatever_the_lengths(model: nn.Module) -> None:
    """Recording, replaying and recomputing with routes that the routers would not choose."""
    replay, layers = mr.attach(model), CompiledLayers("eager")
    replay.keep_routers_eager()
    layers.add(model.model.layers)
    before, graphs = graphs_compiled(), []
    for lengths in LENGTHS:
        run = forward(model, lengths)
        with torch.no_grad(), replay.record() as recording:
            scored = run()
        batch = recording.batch()
        with replay.replay(batch):
            trained = run()
        torch.testing.assert_close(trained, scored, rtol=1e-5, atol=1e-6)
        trained.square().mean().backward()
        found = gradients(model)
        with layers.off(), replay.replay(batch):
            run().square().mean().backward()
        for name, expected in gradients(model).items():
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6, msg=name)
        perturb_routers(replay, scale=0.1)
        graphs.append(graphs_compiled())
    assert layers.failure is None
    assert graphs[-1] == graphs[1], graphs  # after the second lengths nothing is compiled
    assert graphs[-1] - before <= 10  # 5 pieces around attention, router and experts, twice; not for each layer


def test_layers_of_shared_prompts_compute_the_same_in_the_same_graphs(model: nn.Module) -> None:
    layers, graphs = CompiledLayers("aot_eager"), []
    layers.add(model.model.layers)
    trees: list[tuple[list[int], list[tuple[int, int]]]] = [
        ([7, 9, 12], [(0, 0), (0, 4), (1, 6)]),
        ([20, 11], [(0, 0), (0, 9)]),
        ([6, 8, 8, 13], [(0, 0), (0, 5), (0, 5), (1, 7)]),
        ([30, 31], [(0, 0), (0, 29)]),
    ]
    for lengths, prefixes in trees:
        layout = TokenLayout.shared(lengths, prefixes)
        positions = torch.cat([torch.arange(p, n) for n, (_, p) in zip(lengths, prefixes, strict=True)])[None]
        ids = random_ids(1, layout.num_rows, seed=sum(lengths))
        arguments = forward_arguments(model, layout, CPU)
        outcomes = []
        for context in (nullcontext(), layers.off()):
            with context:
                logits = model(input_ids=ids, position_ids=positions, use_cache=False, **arguments).logits
                logits.square().mean().backward()
            outcomes.append({"logits": logits.detach(), **gradients(model)})
        for name, expected in outcomes[1].items():
            torch.testing.assert_close(outcomes[0][name], expected, rtol=1e-4, atol=1e-6, msg=name)
        graphs.append(graphs_compiled())
    assert layers.failure is None
    assert graphs[-1] == graphs[1], graphs


def test_micro_batches_in_flight_are_recomputed_with_their_own_routes(model: nn.Module) -> None:
    replay, layers = mr.attach(model), CompiledLayers("aot_eager")
    replay.keep_routers_eager()
    runs = [forward(model, lengths) for lengths in LENGTHS[:3]]
    batches = []
    for run in runs:
        with torch.no_grad(), replay.record() as recording:
            run()
        batches.append(recording.batch())
    perturb_routers(replay)
    expected = []
    for run, batch in zip(runs, batches, strict=True):
        with replay.replay(batch):
            run().square().mean().backward()
        expected.append(gradients(model))
    layers.add(model.model.layers)
    losses = []
    for run, batch in zip(runs, batches, strict=True):
        with replay.replay(batch):
            losses.append(run().square().mean())
    for index in (2, 0, 1):
        losses[index].backward()
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, expected[index][name], rtol=1e-4, atol=1e-6, msg=name)


def test_what_the_compiler_cannot_do_runs_eagerly_with_one_line(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(compilation.logger, "warning", lambda text, *values: lines.append(text % values))

    def broken(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no such lowering")

    expected = forward(model, LENGTHS[0])()
    layers = CompiledLayers(broken)
    layers.add(model.model.layers)
    assert torch.equal(forward(model, LENGTHS[0])(), expected)
    assert len(lines) == 1
    assert "layers cannot be compiled and run eagerly (model.compile)" in lines[0]
    assert "no such lowering" in lines[0]


def test_errors_of_the_model_itself_are_not_taken_for_the_compilers(model: nn.Module) -> None:
    layers = CompiledLayers("eager")
    layers.add(model.model.layers)
    with pytest.raises(ReplayStateError):
        raise_in_router(model, layers)
    assert layers.failure is None


def raise_in_router(model: nn.Module, layers: CompiledLayers) -> None:
    replay = mr.attach(model)
    replay.keep_routers_eager()
    run = forward(model, LENGTHS[0])
    with torch.no_grad(), replay.record():
        run()
        run()  # a second forward in one context


@pytest.mark.whole_runs
def test_a_run_with_compiled_layers(
    config: Callable[..., Any],
    metrics_of: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU the default is eager; where layers are compiled, the run says how many graphs there are.

    They are compiled with the lengths of a GPU, and the micro-batches of the run need no other graphs.
    """
    monkeypatch.setattr("moe_replay.train.backends.compilation.COMPILER", "aot_eager")
    monkeypatch.setattr(fsdp, "LENGTHS", fsdp.COMPILED_LENGTHS[:2])
    algorithm = {"updates_per_rollout": 2}
    eager = metrics_of(train(config("eager", steps=2, replay={"mode": "r2"}, algorithm=algorithm)))
    assert "graphs" not in caplog.text
    with caplog.at_level(logging.INFO):
        made = config("compiled", steps=2, replay={"mode": "r2"}, algorithm=algorithm, model={"compile": True})
        compiled = metrics_of(train(made))
    started, *later = re.findall(r"(\w+) compiled (\d+) graphs", caplog.text)
    assert started[0] == "start"
    assert sum(int(graphs) for _, graphs in later) <= HEAD_GRAPHS
    assert "run eagerly" not in caplog.text
    for line, expected in zip(compiled, eager, strict=True):
        assert line["loss/total"] == pytest.approx(expected["loss/total"], abs=1e-4)


def test_code_of_more_kinds_than_torchs_own_limit_stays_compiled() -> None:
    """With and without gradients, shared prompts, several kinds of layers: torch stops at 8 without a word."""
    function = CompiledLayers("eager").function(lambda tensor, kind: tensor + len(kind))
    before = graphs_compiled()
    for number in range(12):
        assert function(torch.ones(3), "x" * number).tolist() == [1.0 + number] * 3
    assert graphs_compiled() - before == 12
