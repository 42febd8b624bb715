"""Replay policies on both adapters, in float64, against routers that are written out here, row by row."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5.0")  # whose routers are written out here

import moe_replay as mr
from moe_replay.errors import ReplayStateError, UnsupportedRouterError
from moe_replay.replay import ReplayPolicy
from moe_replay.replay.policy import RoutingWeights, within_margin
from moe_replay.replay.site import PlanSlot, RouterSite
from tests.distributed.megatron_models import FULL
from tests.models import gradients, random_ids
from tests.replay.adapters.families import tiny_model
from tests.replay.adapters.megatron_routers import build, call
from tests.replay.adapters.watching import random_routes, route_batch

IDS = random_ids(2, 7, vocabulary=50)
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
Choose = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, scores (R, E), routing weights (R, E)) -> experts (R, K), scores at them that gates are made of (R, K)."""


# ---- policies, written out ------------------------------------------------------------------------------------------


@dataclass
class Written:
    """A policy as one reads it: recorded routes and, row by row, what is taken of them."""

    routes: mr.RouteBatch
    policy: ReplayPolicy

    def __call__(self, layer: int, scores: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        recorded, valid, _ = self.routes.layer(layer)
        gates = self.routes.layer_gates(layer)
        experts, values = [], []
        for row, own in enumerate(scores):
            native = torch.topk(own, recorded.shape[1]).indices.tolist()
            taken = self.experts(weights[row].log().tolist(), recorded[row].tolist(), native) if valid[row] else native
            experts.append(taken)
            is_gated = self.policy.gates and valid[row]
            values.append(gates[row].to(own) if is_gated and gates is not None else own[taken])
        return torch.tensor(experts), torch.stack(values)

    def experts(self, scores: list[float], recorded: list[int], native: list[int]) -> list[int]:
        """Recorded experts, unless the router's own of the same rank is better by more than the margin."""
        best = sorted((e for e in recorded if e not in native), key=lambda e: -scores[e])
        own = sorted((e for e in native if e not in recorded), key=lambda e: -scores[e])
        kept = {r: o for r, o in zip(best, own, strict=True) if scores[o] - scores[r] > self.policy.margin}
        return [kept.get(expert, expert) for expert in recorded]


# ---- models with written routers ------------------------------------------------------------------------------------


class Transformers:
    """A model of Transformers in float64; `family` says whether it chooses by probabilities or by logits."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.model: Any = tiny_model(family).double().train()
        self.model.set_experts_implementation("eager")  # torch's grouped GEMM has no float64
        self.inputs = {"input_ids": IDS, "use_cache": False}

    def output(self) -> Tensor:
        return self.model(**self.inputs).logits

    def recompute(self) -> None:
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    @contextmanager
    def written(self, sites: Mapping[int, RouterSite], choose: Choose) -> Iterator[None]:
        for layer, site in sites.items():
            site.module.forward = types.MethodType(self._forward(layer, choose), site.module)
        yield
        for site in sites.values():
            del site.module.forward

    def _forward(self, layer: int, choose: Choose) -> Callable[..., Any]:
        def logits_of(router: Any, hidden: Tensor) -> Tensor:
            bias = router.bias if self.family == "gpt_oss" else None
            return nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, bias)

        def by_logits(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = logits_of(router, hidden)
            experts, values = choose(layer, logits, logits.softmax(-1))
            return logits, values.softmax(-1), experts

        def by_probabilities(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = logits_of(router, hidden)
            weights = logits.float().softmax(-1)
            experts, values = choose(layer, weights, weights)
            return logits, (values / values.sum(-1, keepdim=True)).to(logits.dtype), experts

        return by_logits if self.family == "gpt_oss" else by_probabilities


class Megatron:
    """A Megatron-Core model in float64, whose routers choose by logits or, with "presoftmax", by probabilities."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.model: Any = build(variant).double()

    def output(self) -> Tensor:
        return call(self.model, IDS)

    def recompute(self) -> None:
        for name, value in FULL.items():
            setattr(self.model.config, name, value)

    @contextmanager
    def written(self, sites: Mapping[int, RouterSite], choose: Choose) -> Iterator[None]:
        for layer, site in sites.items():
            router: Any = site.module
            router.routing = types.MethodType(self._routing(layer, choose), router)
        yield
        for site in sites.values():
            del site.module.routing

    def _routing(self, layer: int, choose: Choose) -> Callable[..., Any]:
        def routing(router: Any, logits: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
            logits = logits.view(-1, logits.shape[-1])
            if self.variant == "presoftmax":
                weights = logits.float().softmax(-1).to(logits.dtype)
                experts, probs = choose(layer, weights, weights)
            else:
                experts, values = choose(layer, logits, logits.softmax(-1))
                probs = values.float().softmax(-1).to(logits.dtype)
            empty = torch.zeros_like(logits)
            return empty.scatter(1, experts, probs), empty.scatter(1, experts, 1.0).bool()

        return routing


MODELS = {"probabilities": "mixtral", "logits": "gpt_oss", "megatron": "hybrid", "megatron-presoftmax": "presoftmax"}


@pytest.fixture(params=MODELS)
def stack(request: pytest.FixtureRequest) -> Transformers | Megatron:
    name = MODELS[request.param]
    if not request.param.startswith("megatron"):
        return Transformers(name)
    pytest.importorskip("megatron.core")
    request.getfixturevalue("one_rank")
    return Megatron(name)


Stack = Transformers | Megatron


def record(stack: Stack) -> tuple[mr.RouterReplay, mr.RouteBatch]:
    """Record routes and gates, then move the routers."""
    replay = mr.attach(stack.model)
    with torch.no_grad(), replay.record(gates=True) as recording:
        stack.output()
    move(replay)
    return replay, recording.batch()


def move(replay: mr.RouterReplay) -> None:
    """Give every router other weights."""
    generator = torch.Generator().manual_seed(3)
    for site in replay.sites.values():
        for weight in site.module.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.data += 0.7 * weight.data.std() * noise


def without_rows(routes: mr.RouteBatch) -> mr.RouteBatch:
    """Every third row has no route."""
    valid = torch.arange(routes.num_rows) % 3 != 0
    return replace(
        routes, valid=valid.expand(len(routes.layers), -1), all_valid=(False,) * len(routes.layers), gates=routes.gates
    )


def output_and_gradient(stack: Stack) -> tuple[Tensor, dict[str, Tensor]]:
    output = stack.output()
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=output.dtype)
    (output * weights).sum().backward()
    return output.detach(), gradients(stack.model)


POLICIES = {"ids": ReplayPolicy(), "gates": ReplayPolicy(gates=True), "margin": ReplayPolicy(margin=0.1)}


@pytest.mark.parametrize("rows", ["every", "some"])
@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_output_and_gradient_are_those_of_the_written_router(
    stack: Stack, policy: ReplayPolicy, recomputed: bool, rows: str
) -> None:
    replay, routes = record(stack)
    routes = routes if rows == "every" else without_rows(routes)
    replay.detach()
    with stack.written(replay.sites, Written(routes, policy)):
        expected, gradient = output_and_gradient(stack)

    replay = mr.attach(stack.model)
    if recomputed:
        stack.recompute()
    with replay.replay(routes, policy=policy):
        output, found = output_and_gradient(stack)
    torch.testing.assert_close(output, expected, **CLOSE)
    assert found.keys() >= gradient.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, gradient.get(name, torch.zeros_like(value)), **CLOSE, msg=lambda m: name + m)  # noqa: B023


def test_the_policy_decides(stack: Stack) -> None:
    """Policies differ where routers have moved: otherwise the test above would compare nothing."""
    replay, routes = record(stack)
    outputs = []
    for policy in POLICIES.values():
        with torch.no_grad(), replay.replay(routes, policy=policy):
            outputs.append(stack.output())
    for one in range(len(outputs)):
        for other in range(one):
            assert not torch.allclose(outputs[one], outputs[other], rtol=1e-6)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_gates_that_were_not_recorded_are_refused() -> None:
    stack = Transformers("mixtral")
    replay, routes = record(stack)
    with (
        pytest.raises(mr.AlignmentError, match="no gate weights"),
        replay.replay(replace(routes, gates=None), policy=ReplayPolicy(gates=True)),
    ):
        pass


@pytest.mark.usefixtures("one_rank")
def test_gates_that_megatron_reads_after_the_choice_are_refused() -> None:
    pytest.importorskip("megatron.core")
    replay = mr.attach(build("deepseek"))
    with pytest.raises(UnsupportedRouterError, match="expert bias"), replay.record(gates=True):
        pass


# ---- margin ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("margin", [0.0, 0.1, 0.5, math.inf])
def test_experts_within_a_margin(margin: float) -> None:
    """Of random scores and routes, against the rule as written above."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(200, 6, generator=generator)
    recorded = torch.rand(200, 6, generator=generator).argsort(-1)[:, :3]
    native = scores.topk(3).indices
    taken = within_margin(scores, recorded, native, margin)
    rule = Written(None, ReplayPolicy(margin=margin))  # type: ignore[arg-type]
    expected = [rule.experts(*(x.tolist() for x in row)) for row in zip(scores, recorded, native, strict=True)]
    assert taken.routed_experts.tolist() == expected
    differs = torch.tensor([[e not in own for e in row] for row, own in zip(recorded.tolist(), native, strict=True)])
    assert torch.equal(taken.differs, differs)
    assert torch.equal(taken.replaced, differs & (taken.routed_experts == recorded))
    assert taken.replaced.any() == (margin > 0)
    assert torch.equal(taken.replaced, taken.differs) == (margin == math.inf)


@pytest.mark.parametrize("margin", [0.0, 1e9])
def test_choices_are_counted_where_there_are_routes(stack: Stack, margin: float) -> None:
    replay, routes = record(stack)
    routes = without_rows(routes)
    policy = ReplayPolicy(margin=margin)
    with torch.no_grad(), replay.replay(routes, policy=policy, observe=True) as replaying:
        stack.output()
    native, choices = replaying.native(), replaying.choices()
    assert tuple(choices) == replay.layers
    for layer, (differing, replaced) in choices.items():
        recorded, valid, _ = routes.layer(layer)
        own = native.layer(layer)[0]
        absent = (recorded[:, :, None] != own[:, None, :]).all(-1).sum(-1) * valid
        assert torch.equal(differing.long(), absent)
        assert torch.equal(replaced, differing if margin else torch.zeros_like(replaced))
        assert differing.any()


def test_routers_that_keep_groups_are_refused() -> None:
    replay = mr.attach(tiny_model("deepseek_v3"))
    batch = route_batch(replay, IDS, random_routes(replay, IDS))
    with (
        pytest.raises(UnsupportedRouterError, match="groups of experts"),
        replay.replay(batch, policy=POLICIES["margin"]),
    ):
        pass


def test_a_plan_is_refused_with_a_margin_and_none_is_made() -> None:
    """Experts are not known before the router has run."""
    model = tiny_model("mixtral")
    replay = mr.attach(model)
    slots = [PlanSlot(layer, site.num_experts) for layer, site in replay.sites.items()]
    finished: list[Any] = []

    def finish(plan: Any, _layers: Any) -> Any:
        finished.append(plan)
        return plan

    replay.give_plans(slots, finish)
    batch = route_batch(replay, IDS, random_routes(replay, IDS))
    for policy in (POLICIES["ids"], POLICIES["margin"]):
        with torch.no_grad(), replay.replay(batch, policy=policy):
            model(IDS)
    planned, not_planned = finished  # ranks agree about it in both
    assert planned is not None
    assert not_planned is None
    plan = replay.plan_rows(batch)
    with pytest.raises(ReplayStateError, match="margin"), replay.replay(batch, policy=POLICIES["margin"], plan=plan):
        pass


def test_a_policy_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="margin"):
        ReplayPolicy(gates=True, margin=0.1)
    with pytest.raises(ValueError, match="at least 0"):
        ReplayPolicy(margin=math.nan)


# ---- router shift ---------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """A rule, and the logarithms of routing weights that its routers had."""

    rule: Choose
    log_weights: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, layer: int, scores: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        self.log_weights[layer] = weights.detach().double().log()
        return self.rule(layer, scores, weights)


def native(layer: int, scores: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    best = scores.topk(2)
    return best.indices, best.values


@pytest.mark.parametrize("replayed", [False, True], ids=["native", "replayed"])
def test_the_shift_of_routers_is_the_one_written_out(stack: Stack, replayed: bool) -> None:
    """mean over layers and over the experts of the old forward of |log r - log r_old|, row by row."""
    old, now = Watched(native), Watched(native)
    replay = mr.attach(stack.model)
    with torch.no_grad(), replay.record(weights=True) as recording:
        stack.output()
    weights, routes = recording.routing_weights(), recording.batch()
    replay.detach()
    with torch.no_grad(), stack.written(replay.sites, old):
        stack.output()
    move(replay)
    if replayed:
        now = Watched(Written(routes, ReplayPolicy()))
    with torch.no_grad(), stack.written(replay.sites, now):
        stack.output()
    expected = []
    for row in range(routes.num_rows):
        distances = []
        for layer in replay.layers:
            for expert in routes.layer(layer)[0][row].tolist():
                distances.append(abs(now.log_weights[layer][row, expert] - old.log_weights[layer][row, expert]))
        expected.append(sum(distances) / len(distances))

    replay = mr.attach(stack.model)
    with replay.replay(routes, since=weights) if replayed else replay.record(since=weights) as compared:
        stack.output()
    shift = compared.router_shift()
    torch.testing.assert_close(shift.double(), torch.stack(expected), rtol=1e-5, atol=1e-6)
    assert shift.min() > 0
    assert not shift.requires_grad


def test_nothing_shifts_where_nothing_moves(stack: Stack) -> None:
    replay = mr.attach(stack.model)
    with torch.no_grad(), replay.record(weights=True) as recording:
        stack.output()
    with torch.no_grad(), replay.replay(recording.batch(), since=recording.routing_weights()) as compared:
        stack.output()
    assert not compared.router_shift().any()


def test_weights_of_other_rows_or_layers_are_refused() -> None:
    stack = Transformers("mixtral")
    replay = mr.attach(stack.model)
    with torch.no_grad(), replay.record(weights=True) as recording:
        stack.output()
    weights = recording.routing_weights()
    others = list(weights.log_weights)[1:]
    fewer = RoutingWeights(weights.routed_experts, {layer: weights.log_weights[layer] for layer in others})
    with pytest.raises(mr.AlignmentError, match="lack a layer"), replay.record(since=fewer):
        pass
    stack.inputs["input_ids"] = IDS[:1]
    with torch.no_grad(), pytest.raises(mr.AlignmentError, match="rows"), replay.record(since=weights):
        stack.output()
    with torch.no_grad(), replay.record() as recording:
        stack.output()
    with pytest.raises(ReplayStateError, match="nothing was compared"):
        recording.router_shift()
