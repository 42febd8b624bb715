"""`moe-replay verify --gate`: healthy runs pass, and each planted fault fails with its name, on the study's numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from moe_replay.engines.transformers import TransformersEngine
from moe_replay.records import Sample, SamplingParams
from moe_replay.tools.attribution import attribute, attribute_traces
from moe_replay.verification import signatures as s
from moe_replay.verification.signatures import GATE, Signature, gate, is_beyond, likely_faults
from tests.engines.tiny import VOCABULARY, tiny_model
from tests.tools.late_engine import late
from tests.verification.faults import GALLERY

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "faults" / "signatures.json"
MEASURED: dict[str, dict[str, dict]] = json.loads(RESULT.read_text(encoding="utf-8"))
ENGINE_FAULTS = {
    "old weights, 20 updates": s.OLD_WEIGHTS,
    "prefix cache kept over a sync": s.PREFIX,
    "LoRA ignored by the engine": s.ADAPTER,
    "expert-parallel slice of another rank": s.EXPERTS,
    "retracted, old log-probs kept": s.OLD_LOGPROBS,
    "temperature left out by the trainer": s.TEMPERATURE,
    "top-p without its mask": s.TRUNCATED,
}


def signatures_of(arm: str) -> list[Signature]:
    known = {field.name for field in fields(Signature)}
    found = [arms[arm] for arms in MEASURED.values() if arm in arms]
    assert found
    return [Signature(**{key: value for key, value in one.items() if key in known}) for one in found]


def is_caught(signature: Signature) -> bool:
    numbers = asdict(signature)
    return signature.cause not in s.NO_FAULT or any(is_beyond(numbers, name) for name in GATE)


@pytest.mark.parametrize("arm", ["healthy", "healthy, other samples", "healthy, float32"])
def test_a_healthy_run_of_the_study_passes(arm: str) -> None:
    assert not any(map(is_caught, signatures_of(arm)))


@pytest.mark.parametrize(("arm", "fault"), ENGINE_FAULTS.items())
def test_a_fault_of_the_engine_is_caught_and_named_in_every_seed(arm: str, fault: str) -> None:
    for signature in signatures_of(arm):
        assert is_caught(signature)
        assert fault in likely_faults(signature)


ROUTE_FAULTS = sorted(
    arm
    for arm, one in MEASURED["0"].items()
    if arm.replace(" ", "_") in {planted.name for planted in GALLERY} and "refused" not in one
)


@pytest.mark.parametrize("arm", ROUTE_FAULTS)
def test_misplaced_routes_are_caught_and_named_in_every_seed(arm: str) -> None:
    for signature in signatures_of(arm):
        assert is_caught(signature)
        assert likely_faults(signature)[0].startswith(s.MISPLACED)


def test_the_limits_are_those_of_the_healthy_runs() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from experiments.faults import limits_of

    assert limits_of(MEASURED) == GATE


# ---- on a model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("qwen3_moe")


@pytest.fixture(scope="module")
def samples(model: nn.Module) -> list[Sample]:
    prompts = torch.randint(1, VOCABULARY, (12, 16), generator=torch.Generator().manual_seed(0)).tolist()
    engine = TransformersEngine(model, max_length=96)
    groups = engine.generate(prompts, SamplingParams(max_tokens=48, seed=0))
    engine.close()
    return [sample for group in groups for sample in group]


def other_model(model: nn.Module) -> nn.Module:
    other = tiny_model("qwen3_moe")
    other.load_state_dict(model.state_dict())
    return other


def test_the_same_weights_pass(model: nn.Module, samples: list[Sample]) -> None:
    assert gate(attribute(model, samples)) == []
    assert gate(attribute_traces(model, [sample.trace for sample in samples])) == []


def test_routes_one_layer_late_are_named_with_and_without_log_probs(model: nn.Module, samples: list[Sample]) -> None:
    moved = [replace(sample, trace=late(sample.trace)) for sample in samples]
    fault = f"likely fault: {s.MISPLACED}, layer shift"
    lines = gate(attribute(model, moved))
    assert lines[0].startswith("k3 with R3 is ")
    assert lines[-1] == fault
    only_routes = gate(attribute_traces(model, [sample.trace for sample in moved]))
    assert [line.partition(" is ")[0] for line in only_routes] == [
        "agreement",
        "agreement in the worst layer",
        fault,
    ]


def test_experts_of_another_rank_are_named(model: nn.Module, samples: list[Sample]) -> None:
    trainer = other_model(model)
    with torch.no_grad():
        for layer in trainer.model.layers[1:]:
            for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                weight[len(weight) // 2 :] = weight[: len(weight) // 2].clone()
    assert gate(attribute(trainer, samples))[-1] == f"likely fault: {s.EXPERTS}"


def test_log_probs_of_another_head_are_told_from_other_weights(model: nn.Module, samples: list[Sample]) -> None:
    trainer = other_model(model)
    with torch.no_grad():
        trainer.lm_head.weight *= 1.2
    lines = gate(attribute(trainer, samples))
    assert not any(line.startswith("agreement") for line in lines)
    assert lines[-1] == f"likely fault: {'; or '.join((s.OLD_LOGPROBS, s.TEMPERATURE, s.RECENT_WEIGHTS))}"


def test_routers_that_differ_alone_are_named(model: nn.Module, samples: list[Sample]) -> None:
    signature = Signature.of(attribute(model, samples))
    assert likely_faults(replace(signature, first_layer=0.6, worst_layer=0.5)) == (s.ROUTERS,)
    assert likely_faults(replace(signature, k3_native=1.0)) == (s.PRECISION,)


@pytest.mark.parametrize("distance", [-1e4, 400.0, 1e4])
def test_log_probs_far_apart_are_beyond_the_limits(model: nn.Module, samples: list[Sample], distance: float) -> None:
    moved = [replace(sample, logprobs=sample.logprobs - np.float32(distance)) for sample in samples]
    signature = Signature.of(attribute(model, moved))
    assert is_beyond(asdict(signature), "k3")
    assert is_beyond(asdict(signature), "ratio_errors")


def test_what_is_not_a_number_is_beyond_every_limit() -> None:
    assert all(is_beyond({name: float("nan")}, name) for name in GATE)
