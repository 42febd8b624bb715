"""Every example of docs/extending.md is complete, short, and does through the library's own entrance what it says."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("pydantic")

from pydantic import ValidationError

import moe_replay as mr
from moe_replay.engines.base import StartRequest
from moe_replay.engines.registry import start_engine, start_sampler
from moe_replay.megatron import weights
from moe_replay.records import SamplingParams
from moe_replay.train.learn.losses import LossInputs, LossSettings, load_loss
from moe_replay.train.loop import train
from moe_replay.train.rollout.advantages import load_advantages
from moe_replay.train.setup.preflight import check_packages
from tests.train.runs import tiny_config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "extending.md"
EXAMPLES = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples as files in a folder that modules are imported from."""
    for name, code in EXAMPLES.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in EXAMPLES:
        sys.modules.pop(name, None)


@pytest.fixture
def run(demo_files: Any, tmp_path: Path) -> Run:
    """Two steps of training with settings of the test's own; returns the lines of its metrics."""

    number = itertools.count()

    def start(**overrides: Any) -> list[dict[str, Any]]:
        folder = tmp_path / f"run-{next(number)}"
        config = tiny_config(demo_files.model, demo_files.train, folder, steps=2, **overrides)
        return [json.loads(line) for line in (train(config) / "metrics.jsonl").read_text().splitlines()]

    return start


def test_examples_are_short_and_each_is_run_here() -> None:
    here = Path(__file__).read_text()
    assert PAGE.read_text().count("```python") == len(EXAMPLES) > 0
    assert {name: len(code.splitlines()) + 1 for name, code in EXAMPLES.items() if len(code.splitlines()) >= 39} == {}
    assert [name for name in EXAMPLES if not re.search(rf'"{name}[":]', here)] == []


@pytest.mark.parametrize("name", re.findall(r"^\| \[[^|]*\| `([\w.]+)` \|", PAGE.read_text(), re.MULTILINE))
def test_the_registries_of_the_table_exist(name: str) -> None:
    module, _, registry = name.rpartition(".")
    assert isinstance(getattr(importlib.import_module(f"moe_replay.{module}"), registry), (Mapping, tuple))


def test_a_reward(run: Run) -> None:
    lines = run(reward={"functions": ["my_reward:short_and_right"], "workers": 1})
    rewards = [line["reward/mean"] for line in lines]
    assert all(-0.12 <= reward < 1 and reward != 0 for reward in rewards)  # at most 12 tokens of one character
    scored = importlib.import_module("my_reward").short_and_right([], ["it is 13", "12", "12"], ["13", "13", ""])
    assert scored == [pytest.approx(0.92), pytest.approx(-0.02), None]


def test_an_advantage_estimator(run: Run) -> None:
    rewards = np.array([[1.0, 2.0, 9.0], [np.nan, 4.0, 2.0]])
    found = load_advantages("my_advantage:median_centered")(rewards)
    np.testing.assert_array_equal(found, [[-1, 0, 7], [0, 1, -1]])
    assert [line["step"] for line in run(algorithm={"advantage": "my_advantage:median_centered"})] == [1, 2]


def test_an_environment(run: Run) -> None:
    alone = run()
    again = run(rollout={"environment": "my_environment:second_attempt", "max_turns": 2})
    assert again[0]["completion/length_mean"] > alone[0]["completion/length_mean"]


def test_a_sampler(demo_files: Any) -> None:
    sampler = start_sampler("my_sampler:GenerateSampler", StartRequest(model=str(demo_files.model), dtype="float32"))
    torch.manual_seed(0)
    ((first, second),) = sampler.generate([[5, 6, 7]], SamplingParams(n=2, max_tokens=8))
    for sample in (first, second):
        assert sample.trace.valid[:-1].all()
        assert not sample.trace.valid[-1].any()
    model = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(demo_files.model)
    mr.verify(model, [first.trace, second.trace]).raise_if_misaligned()


def test_an_engine_spec(demo_files: Any, tmp_path: Path) -> None:
    start_engine("my_spec:GENERATE", StartRequest(model=str(demo_files.model))).close()
    rollout = {"engine": "my_spec:GENERATE"}
    check_packages(tiny_config(demo_files.model, demo_files.train, tmp_path, rollout=rollout))
    with pytest.raises(ValidationError, match="my_spec:GENERATE does not return sampling masks"):
        tiny_config(demo_files.model, demo_files.train, tmp_path, rollout=rollout | {"top_p": 0.9})


def test_an_engine(run: Run, demo_files: Any) -> None:
    lines = run(rollout={"engine": "my_engine:GenerateEngine"})
    assert all(line["routing/agreement"] > 0.99 for line in lines)  # the weights of every step have arrived
    assert all(line["mismatch/rollout_vs_old/k3_kl"] < 1e-6 for line in lines)
    engine = start_engine("my_engine:GenerateEngine", StartRequest(model=str(demo_files.model)))
    engine.update_weights(iter(engine.model.state_dict().items()), version=3)
    assert engine.weight_version == 3


def test_a_weight_sync(run: Run) -> None:
    lines = run(weight_sync={"transport": "my_sync:FolderSync"})
    assert all(line["routing/agreement"] > 0.99 for line in lines)  # the weights of every step have arrived
    assert all(line["weights/gb"] > 0 for line in lines)


def test_a_policy_loss(run: Run) -> None:
    lines = run(algorithm={"loss": "my_loss:cispo", "updates_per_rollout": 2})
    assert all("loss/capped" in line and line["loss/ratio"] > 0 for line in lines)
    assert all(line["loss/grad_norm"] > 0 for line in lines)
    assert all("loss/clip_low" not in line for line in lines)  # a metric of the built-in loss
    old = torch.tensor([-1.0, -1.0])
    inputs = LossInputs(
        logprobs=torch.tensor([-0.5, -1.0], requires_grad=True),
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.tensor([1.0, -1.0]),
        weights=torch.tensor([0.5, 0.5]),
        sequence=torch.tensor([0, 1]),
        num_sequences=2,
    )
    output = load_loss("my_loss:cispo")(inputs, LossSettings(clip_high=0.2))
    output.loss.backward()
    torch.testing.assert_close(inputs.logprobs.grad, torch.tensor([-0.6, 0.5]))  # -weight * capped ratio * advantage
    assert output.token_metrics["capped"].tolist() == [True, False]


def test_a_metric_sink(run: Run, tmp_path: Path) -> None:
    lines = run(log={"sinks": ["my_sink:CsvSink"]})
    rows = [row.split(",") for row in (tmp_path / "run-0" / "summary.csv").read_text().splitlines()]
    assert [(int(row[0]), float(row[1])) for row in rows] == [(line["step"], line["reward/mean"]) for line in lines]


def test_a_megatron_weight_family() -> None:
    """It is the one of docs/megatron.md, which is compared with Transformers in tests/distributed."""
    page = PAGE.with_name("megatron.md").read_text()
    assert f"<!-- dots1_weights.py -->\n```python\n{EXAMPLES['dots1_weights']}```" in page
    family = weights.family_of("dots1", "dots1_weights:DOTS1")
    assert "decoder.layers.{layer}.mlp.router.expert_bias" in family.rules


class _Layer(nn.Module):
    """A decoder layer around the router of the page: dense, or with eight linear experts."""

    def __init__(self, gate: nn.Module | None) -> None:
        super().__init__()
        self.gate = gate
        self.experts = nn.Parameter(torch.randn(8, 16, 16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return hidden + hidden @ self.experts[0]
        weights, chosen = self.gate(hidden.flatten(0, 1))
        out = torch.einsum("rh,rkhw->rkw", hidden.flatten(0, 1), self.experts[chosen])
        return hidden + (weights[..., None] * out).sum(1).view_as(hidden)


class _Model(nn.Module):
    def __init__(self, gate: Any) -> None:
        super().__init__()
        sizes = {"num_hidden_layers": 4, "hidden_size": 16, "n_experts": 8, "n_experts_per_token": 2}
        self.config = importlib.import_module("transformers").PretrainedConfig(**sizes)
        self.config.model_type = "my_moe"
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(_Layer(gate(self.config) if layer else None) for layer in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def test_a_router_family() -> None:
    torch.manual_seed(0)
    model = _Model(importlib.import_module("my_router").MyGate)
    with pytest.raises(mr.errors.UnsupportedRouterError, match="my_moe"):
        mr.attach(model)
    replay = mr.attach(model, "my_router:FAMILY")
    assert replay.layers == (1, 2, 3)
    ids = torch.randint(32, (2, 9))
    with torch.no_grad(), replay.record() as recording:
        model(ids)
    recorded = recording.batch()
    with torch.no_grad():
        for site in replay.sites.values():
            site.module.weight.normal_()
    with replay.replay(recorded, observe=True) as replaying:
        model(ids).sum().backward()
    assert (replaying.native().routed_experts != recorded.routed_experts).any()
    assert all(site.module.weight.grad.norm() > 0 for site in replay.sites.values())
