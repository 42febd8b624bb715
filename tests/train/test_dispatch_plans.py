"""Rows that are planned before the forward: bit for bit the results of experts that order rows themselves."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers.integrations.moe", reason="Transformers 4 has no experts by name")

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import moe_replay as mr
from moe_replay.errors import AlignmentError
from moe_replay.replay.policy import ReplayPolicy
from moe_replay.replay.site import PlanSlot
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import RowOrder, TokenLayout
from moe_replay.train.backends import attention, experts
from moe_replay.train.backends.attention import forward_arguments, use_attention
from moe_replay.train.backends.compilation import CompiledLayers
from moe_replay.train.loop import train
from tests.combinations import with_thorough
from tests.models import gradients, random_ids, tiny_qwen3_moe, uncover
from tests.replay.adapters.families import VOCABULARY, available_families, tiny_model
from tests.train.test_compiled_layers import traced_kernel

CPU = torch.device("cpu")
QUICK = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]
WITHOUT = {"dbrx", "jetmoe", "llama4_text", "longcat_flash", "openai_privacy_filter", "step3p5", "zaya"}
"""Families without experts by name, or whose experts are given other ids than the router has chosen."""
IDS = torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))
LENGTHS = [(5, 9), (7, 3, 6), (4, 4, 4, 9), (30, 2)]


class Orders(TorchDispatchMode):
    """Counts how often experts order rows themselves, and sorts of a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.own = self.planned = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.own += function.overloadpacket is torch.ops.moe_replay.dispatch
        self.planned += function.overloadpacket is torch.ops.aten.sort and args[0].dtype == torch.int16
        return function(*args, **(kwargs or {}))


def with_plans(model: Any, run: Callable[[], Any] | None = None) -> mr.RouterReplay:
    """Attach to a model whose experts take plans."""
    ALL_EXPERTS_FUNCTIONS.register(experts.NAME, experts.grouped_experts)
    model.set_experts_implementation(experts.NAME)
    replay = mr.attach(model)
    replay.give_plans(experts.plan_slots(model, replay, run or (lambda: model(input_ids=IDS, use_cache=False))))
    return replay


def random_routes(replay: mr.RouterReplay, fed: Tensor, seed: int = 0) -> RouteBatch:
    """Routes that no router would choose."""
    generator = torch.Generator().manual_seed(seed)
    chosen = {
        layer: torch.rand(fed.numel(), site.num_experts, generator=generator).topk(site.top_k).indices
        for layer, site in replay.sites.items()
    }
    return RouteBatch.recorded(chosen, replay.topology, fed, RowOrder("batch"))


def outcome(
    model: Any,
    replay: mr.RouterReplay,
    batch: RouteBatch,
    run: Callable[[], Any],
    *,
    rows: Tensor | slice = slice(None),
    **options: Any,
) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Return logits and gradients under replay; how often experts ordered rows, and how many plans there were.

    rows   whose logits are in the loss
    """
    with Orders() as orders:
        with replay.replay(batch, **options):
            output = run()
        logits = output.last_hidden_state if getattr(output, "logits", None) is None else output.logits
        logits = logits.flatten(0, 1)[rows]
        (logits.float().log_softmax(-1)[..., 7].sum() / 10).backward()
    return {"logits": logits.detach(), **gradients(model)}, (orders.own, orders.planned)


def check_same(
    model: Any, replay: mr.RouterReplay, batch: RouteBatch, run: Callable[[], Any], passes: int, **options: Any
) -> None:
    """Compare outcomes with a plan and without, bit for bit."""
    other = passes * (
        len([*experts.named_experts(model)]) - len(replay.layers)
    )  # deepseek_v4 has layers without routers
    found, orders = outcome(model, replay, batch, run, **options)
    assert orders == (other, 1)
    replay.plans_rows = False
    expected, orders = outcome(model, replay, batch, run, **options)
    replay.plans_rows = True
    assert orders == (other + passes * len(replay.layers), 0)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.fixture
def model() -> nn.Module:
    """Layers that are recomputed in the backward."""
    made: Any = tiny_qwen3_moe(num_hidden_layers=3, mlp_only_layers=[]).train()
    made.gradient_checkpointing_enable({"use_reentrant": False})
    return made


# ---- the same results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "family", with_thorough(available_families(), [name for name in available_families() if name not in QUICK])
)
def test_results_are_those_of_experts_that_order_rows(family: str, recomputed: bool) -> None:
    model = tiny_model(family)
    if family in WITHOUT:
        pytest.skip(f"the experts of {family} take no plans")
    replay = with_plans(model)
    if recomputed:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    batch = random_routes(replay, IDS)
    check_same(model, replay, batch, lambda: model(input_ids=IDS, use_cache=False), 1 + recomputed)


@pytest.mark.parametrize("family", with_thorough(["zaya", "longcat_flash"], ["longcat_flash"]))
def test_experts_that_are_given_other_ids_than_the_router_chose_take_no_plan(family: str) -> None:
    if family not in available_families():
        pytest.skip(f"no {family} in this release")
    model = tiny_model(family)
    assert experts.plan_slots(model, mr.attach(model), lambda: model(input_ids=IDS, use_cache=False)) == []


def test_adapters_of_experts_take_plans() -> None:
    peft = pytest.importorskip("peft")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(
        tiny_qwen3_moe(), peft.LoraConfig(r=2, lora_alpha=4, target_modules=[], target_parameters=names)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    inner = model.base_model.model
    ALL_EXPERTS_FUNCTIONS.register(experts.NAME, experts.grouped_experts)
    inner.set_experts_implementation(experts.NAME)
    replay = mr.attach(model)
    slots = experts.plan_slots(model, replay, lambda: model(input_ids=IDS, use_cache=False))
    replay.give_plans(slots)
    assert [slot.layer for slot in slots] == list(replay.layers)
    check_same(model, replay, random_routes(replay, IDS), lambda: model(input_ids=IDS, use_cache=False), 1)


def test_a_row_without_a_route_leaves_the_order_to_the_experts(model: Any) -> None:
    replay = with_plans(model)
    batch = uncover(random_routes(replay, IDS), every=4)
    _, orders = outcome(model, replay, batch, lambda: model(input_ids=IDS, use_cache=False))
    assert orders == (2 * len(replay.layers), 0)


def test_native_choices_are_observed_beside_a_plan() -> None:
    """deepseek_v3 limits groups: its routers run a second time."""
    for family in ("qwen3_moe", "deepseek_v3"):
        model = tiny_model(family)
        replay = with_plans(model)
        check_same(
            model,
            replay,
            random_routes(replay, IDS),
            lambda m=model: m(input_ids=IDS, use_cache=False),
            1,
            observe=True,
        )


def test_micro_batches_in_flight_are_recomputed_with_their_own_plans(model: Any) -> None:
    replay = with_plans(model)
    fed = [random_ids(2, width, seed=width) for width in (7, 11, 11)]
    batches = [random_routes(replay, ids, seed) for seed, ids in enumerate(fed)]
    expected = [outcome(model, replay, b, lambda i=i: model(input_ids=i))[0] for b, i in zip(batches, fed, strict=True)]
    losses = []
    for batch, ids in zip(batches, fed, strict=True):
        with replay.replay(batch):
            losses.append(model(input_ids=ids).logits.float().log_softmax(-1)[..., 7].sum() / 10)
    for index in (2, 0, 1):
        losses[index].backward()
        for name, gradient in gradients(model).items():
            assert torch.equal(gradient, expected[index][name]), name


# ---- compiled layers and shared prompts ------------------------------------------------------------------------------


@pytest.fixture
def packed(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(attention, "varlen_kernel", lambda: traced_kernel)
    monkeypatch.setattr(attention, "varlen_shares_heads", lambda: True)
    use_attention(model, "varlen", CPU, torch.float32, log=False)
    torch._dynamo.reset()
    yield model
    torch._dynamo.reset()


def forward(
    model: Any, layout: TokenLayout, seed: int = 0, ids: Tensor | None = None
) -> tuple[Tensor, Callable[[], Any]]:
    ids = random_ids(1, layout.num_rows, seed=seed) if ids is None else ids
    positions = torch.tensor([*(p for n in layout.lengths for p in range(n)), 0])[torch.from_numpy(layout.fed.copy())]
    arguments = forward_arguments(model, layout, CPU)
    return ids, lambda: model(input_ids=ids, position_ids=positions, use_cache=False, **arguments)


@pytest.mark.slow
def test_compiled_layers_share_graphs_whatever_the_lengths_with_plans(packed: Any) -> None:
    """In bfloat16: torch compiles grouped GEMMs in no other precision. Graphs are made before the first replay."""
    model = packed.to(torch.bfloat16)
    replay = with_plans(model, forward(model, TokenLayout.packed((3, 4)))[1])
    replay.keep_routers_eager()
    graphs: list[tuple[bool, bool]] = []

    def note(graph: Any, inputs: Any) -> Any:
        code = graph.print_readable(print_output=False)
        if "grouped_mm" in code:
            graphs.append(("moe_replay.dispatch" in code, torch.is_grad_enabled()))
        return aot_eager(graph, inputs)

    layers = CompiledLayers(note)
    layers.add(model.model.layers)
    passes = functools.partial(passes_of, model, replay)
    for context in (nullcontext(), replay.any_plan(14)):
        with context:
            passes(forward(model, TokenLayout.packed(LENGTHS[0]))[1], None)
    made = [(True, False), (True, True), (False, False), (False, True)]
    assert graphs == made  # with own order, with a plan: without and with gradients, not for each layer
    for seed, lengths in enumerate(LENGTHS):
        ids, run = forward(model, TokenLayout.packed(lengths), seed)
        batch, results = random_routes(replay, ids, seed), []
        for replay.plans_rows in (True, False):
            results.append(passes(run, batch))
        assert [name for name in results[1] if not torch.equal(results[0][name], results[1][name])] == []
    assert layers.failure is None
    assert graphs == made


def passes_of(model: Any, replay: mr.RouterReplay, run: Callable[[], Any], batch: RouteBatch | None) -> dict[str, Any]:
    """Score and update, under replay if there is a batch."""
    with torch.no_grad(), nullcontext() if batch is None else replay.replay(batch):
        scored = run().logits
    with nullcontext() if batch is None else replay.replay(batch):
        logits = run().logits
    (logits.float().log_softmax(-1)[..., 7].sum() / 10).backward()
    return {"scored": scored, "logits": logits.detach(), **gradients(model)}


def test_shared_prompts_take_plans(packed: Any) -> None:
    layout = TokenLayout.shared([7, 9, 12], [(0, 0), (0, 4), (1, 6)])
    ids, run = forward(packed, layout)
    replay = with_plans(packed, run)
    check_same(packed, replay, random_routes(replay, ids), run, 2)


# ---- rows on which nothing depends -----------------------------------------------------------------------------------


def engine_routes(replay: mr.RouterReplay, layout: TokenLayout, seed: int = 0) -> tuple[RouteBatch, Tensor]:
    """Routes that no router would choose, of all tokens but the last of each sequence, and ids to feed."""
    random, topology = np.random.default_rng(seed), replay.topology
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for number, length in enumerate(layout.lengths):
        scores = random.random((length, len(topology.layers), topology.num_experts))
        chosen = scores.argsort(-1)[..., : topology.top_k]
        parts.append((random.integers(3, VOCABULARY, length), chosen, np.arange(length) < length - 1))
        if layout.prefixes:
            other, shared = layout.prefixes[number]
            for own, same in zip(parts[number], parts[other], strict=True):
                own[:shared] = same[:shared]
    traces = [mr.RouteTrace(ids, chosen, topology.layers, valid) for ids, chosen, valid in parts]
    batch = RouteBatch.from_traces(traces, layout, stand_ins=True)
    return batch, torch.from_numpy(layout.fed_token_ids([ids for ids, *_ in parts], pad=0)).long()


def check_same_without_last_routes(
    model: Any, replay: mr.RouterReplay, batch: RouteBatch, run: Callable[[], Any], passes: int
) -> None:
    """Compare what is used of a plan with last tokens that are routed natively, and bit for bit with stand-ins."""
    assert batch.layout is not None
    rows = torch.from_numpy(np.flatnonzero(~batch.layout.unused))
    found, orders = outcome(model, replay, batch, run, rows=rows)
    assert orders == (0, 1)
    replay.plans_rows = False
    unplanned, orders = outcome(model, replay, batch, run, rows=rows)
    assert orders == (passes * len(replay.layers), 0)
    replay.takes_stand_ins = False
    native, _ = outcome(model, replay, batch, run, rows=rows)
    replay.plans_rows = replay.takes_stand_ins = True
    assert [name for name in unplanned if not torch.equal(found[name], unplanned[name])] == []
    assert found.keys() == native.keys()
    for name, expected in native.items():  # GEMMs of other sizes round differently
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6, msg=lambda said, n=name: f"{n}: {said}")


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "family", with_thorough(available_families(), [name for name in available_families() if name not in QUICK])
)
def test_sequences_without_their_last_route_are_planned(family: str, recomputed: bool) -> None:
    """Padded: the rows behind shorter sequences have no route either."""
    model = tiny_model(family)
    replay = with_plans(model) if family not in WITHOUT else None
    if replay is None or len(replay.layers) < len([*experts.named_experts(model)]):
        pytest.skip(f"not all experts of {family} take plans")
    if recomputed:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    batch, ids = engine_routes(replay, TokenLayout.padded([11, 6, 9]))
    check_same_without_last_routes(model, replay, batch, lambda: model(input_ids=ids, use_cache=False), 1 + recomputed)


SHARED = [
    TokenLayout.shared([7, 9, 12], [(0, 0), (0, 4), (1, 6)]),
    TokenLayout.packed([7, 3, 12]),
    TokenLayout.packed([7, 3, 12]).pad_to(multiple_of=8),
]


@pytest.mark.parametrize("layout", SHARED, ids=["shared", "packed", "padded to a multiple"])
def test_packed_sequences_without_their_last_route_are_planned(packed: Any, layout: TokenLayout) -> None:
    replay = with_plans(packed, forward(packed, TokenLayout.packed((3, 4)))[1])
    batch, ids = engine_routes(replay, layout)
    check_same_without_last_routes(packed, replay, batch, forward(packed, layout, ids=ids)[1], 2)


def test_a_last_token_that_another_sequence_goes_on_behind_is_not_planned_without_a_route(packed: Any) -> None:
    layout = TokenLayout.shared([7, 12], [(0, 0), (0, 7)])
    replay = with_plans(packed, forward(packed, TokenLayout.packed((3, 4)))[1])
    batch, ids = engine_routes(replay, layout)
    _, orders = outcome(packed, replay, batch, forward(packed, layout, ids=ids)[1])
    assert orders == (2 * len(replay.layers), 0)


def test_a_choice_behind_a_stand_in_is_nobodys_own(model: Any) -> None:
    """Of deepseek_v3 too, whose routers run a second time to be observed."""
    for observed in (model, tiny_model("deepseek_v3")):
        replay = with_plans(observed)
        batch, ids = engine_routes(replay, TokenLayout.padded([11, 6]))
        with replay.replay(batch, observe=True) as replaying:
            observed(input_ids=ids, use_cache=False)
        assert torch.equal(replaying.native().valid, batch.valid)
        assert replaying.native().all_valid == batch.all_valid
        replay.takes_stand_ins = False
        with replay.replay(batch, observe=True) as replaying:
            observed(input_ids=ids, use_cache=False)
        assert all(replaying.native().all_valid)


class TopK(TorchDispatchMode):
    """Counts how often experts are chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += function.overloadpacket is torch.ops.aten.topk
        return function(*args, **(kwargs or {}))


def test_no_router_chooses_where_all_rows_have_routes_or_stand_ins(model: Any) -> None:
    replay = mr.attach(model)
    batch, ids = engine_routes(replay, TokenLayout.padded([11, 6]))
    for replay.takes_stand_ins, observe, expected in (True, False, 0), (True, True, 3), (False, False, 3):
        with TopK() as chosen, replay.replay(batch, observe=observe):
            model(input_ids=ids, use_cache=False)
        assert chosen.calls == expected


def test_a_margin_decides_about_no_row_that_has_a_stand_in(model: Any) -> None:
    replay = mr.attach(model)
    batch, ids = engine_routes(replay, TokenLayout.padded([11, 6]))
    with replay.replay(batch, policy=ReplayPolicy(margin=0.01)) as replaying:
        model(input_ids=ids, use_cache=False)
    counts = replaying.choices()
    assert all(counts[layer].any() for layer in batch.layers)
    assert not any(counts[layer][:, ~batch.layer(layer)[1]].any() for layer in batch.layers)


def test_a_token_that_no_trace_has_is_sent_to_no_stand_in(model: Any) -> None:
    replay = with_plans(model)
    layout = TokenLayout.padded([11, 6])
    batch, ids = engine_routes(replay, layout)
    ids[1, 6] = 9  # behind the second sequence
    with torch.no_grad(), replay.replay(replace(batch, stand_ins=False), allow_unknown_tokens=True):
        native = model(input_ids=ids, use_cache=False).logits
    with torch.no_grad(), replay.replay(batch, allow_unknown_tokens=True) as replaying:
        found = model(input_ids=ids, use_cache=False).logits
    assert replaying.unknown_tokens == 1
    assert torch.equal(found, native)


def test_losses_over_all_rows_take_no_stand_ins(model: Any) -> None:
    replay = with_plans(model)
    batch, ids = engine_routes(replay, TokenLayout.padded([11, 6]))
    replay.takes_stand_ins = False
    _, orders = outcome(model, replay, batch, lambda: model(input_ids=ids, use_cache=False))
    assert orders == (2 * len(replay.layers), 0)
    _, orders = outcome(model, replay, random_routes(replay, ids), lambda: model(input_ids=ids, use_cache=False))
    assert orders == (0, 1)


# ---- plans that are given, and their end -----------------------------------------------------------------------------


def test_a_plan_that_is_made_before_serves_several_passes(model: Any) -> None:
    replay = with_plans(model)
    batch = random_routes(replay, IDS)
    plan = replay.plan_rows(batch)
    expected, _ = outcome(model, replay, batch, lambda: model(input_ids=IDS))
    for _ in range(2):
        found, orders = outcome(model, replay, batch, lambda: model(input_ids=IDS), plan=plan)
        assert orders == (0, 0)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_plan_of_other_routes_is_refused(model: Any) -> None:
    replay = with_plans(model)
    batch, other = (random_routes(replay, IDS, seed) for seed in (0, 1))
    with pytest.raises(AlignmentError, match="another micro-batch"), replay.replay(batch, plan=replay.plan_rows(other)):
        pass
    plan = replay.plan_rows(batch)
    batch.routed_experts[0] = batch.routed_experts[1]
    with pytest.raises(AlignmentError, match="changed since"), replay.replay(batch, plan=plan):
        pass


def test_a_plan_of_rows_that_route_natively_is_refused(model: Any) -> None:
    """Of the same ids: experts would take the replayed ones in rows where routers choose others."""
    replay = with_plans(model)
    batch = random_routes(replay, IDS)
    plan = replay.plan_rows(batch)
    partial = replace(batch, valid=torch.zeros_like(batch.valid), all_valid=(True, False, True))
    with pytest.raises(AlignmentError, match=r"rows without a route.*layers \[1\]"), replay.replay(partial, plan=plan):
        pass
    batch, _ = engine_routes(replay, TokenLayout.padded([11, 6]))
    plan = replay.plan_rows(batch)
    with (
        pytest.raises(AlignmentError, match="rows without"),
        replay.replay(batch, plan=plan, allow_unknown_tokens=True),
    ):
        pass
    replay.takes_stand_ins = False
    with pytest.raises(AlignmentError, match="rows without a route"), replay.replay(batch, plan=plan):
        pass


def test_experts_refuse_the_plan_of_other_rows(model: Any) -> None:
    replay = with_plans(model)
    module: Any = next(module for _, module in experts.named_experts(model))
    module.plan_slot.put(replay.plan_rows(random_routes(replay, IDS)))
    with pytest.raises(AlignmentError, match="other rows than their dispatch plan has") as raised:
        module(torch.zeros(5, 32), torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2))
    assert "layer 0" in str(raised.value)


def test_plans_are_dropped_after_the_backward(model: Any) -> None:
    replay = with_plans(model)
    batch = random_routes(replay, IDS)
    plan = replay.plan_rows(batch)
    assert plan is not None
    kept = [weakref.ref(part) for part in (plan.pair, plan.row)]
    with replay.replay(batch, plan=plan):
        loss = model(input_ids=IDS).logits.sum()
    slots = [module.plan_slot for _, module in experts.named_experts(model)]
    assert all(slot.plan is None for slot in slots)
    del plan
    loss.backward()
    assert all(slot.plan is None for slot in slots)
    del loss
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def test_a_copy_of_a_model_has_its_own_slots(model: Any) -> None:
    replay = with_plans(model)
    copied = copy.deepcopy(model)
    slots = [[module.plan_slot for _, module in experts.named_experts(one)] for one in (model, copied)]
    assert not {*map(id, slots[0])} & {*map(id, slots[1])}
    with replay.replay(random_routes(replay, IDS)):
        model(input_ids=IDS)
        assert all(slot.plan is not None for slot in slots[0])
        assert all(slot.plan is None for slot in slots[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "is_compiled"),
    with_thorough([("r2", False), ("r3", False), ("r2", True), ("r3", True)], [("r2", True), ("r3", True)]),
)
def test_a_run_with_plans_is_the_run_without(
    config: Callable[..., Any],
    metrics_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    is_compiled: bool,
) -> None:
    """With the experts of a GPU on a CPU: every metric that is not a time is the same, with r2 bit for bit.

    The rollout's routes lack the last token of every sequence, as those of any engine do: with plans they share the
    GEMMs of other rows, which round differently.
    """
    monkeypatch.setattr("moe_replay.train.backends.compilation.COMPILER", "aot_eager")
    use = experts.use_experts
    monkeypatch.setattr(experts, "use_experts", lambda model, device, **rest: use(model, torch.device("cuda"), **rest))
    given: list[int] = []
    put = PlanSlot.put
    monkeypatch.setattr(PlanSlot, "put", lambda slot, plan: (given.append(plan is not None), put(slot, plan))[1])
    lines = []
    for plans_rows in (True, False):
        monkeypatch.setattr("moe_replay.train.backends.fsdp.PLANS_ALONE", plans_rows)
        model = {"compile": is_compiled, "gradient_checkpointing": True}
        model |= {"dtype": "bfloat16"} if is_compiled else {}  # torch compiles grouped GEMMs in no other precision
        algorithm = {"updates_per_rollout": 2}
        name = "planned" if plans_rows else "ordered"
        lines.append(metrics_of(train(config(name, steps=2, replay={"mode": mode}, algorithm=algorithm, model=model))))
        assert any(given) is plans_rows
        given.clear()
    for found, expected in zip(*lines, strict=True):
        assert found.keys() - {"batch/planned"} == expected.keys()
        values = {
            name: value for name, value in expected.items() if name.startswith(("loss/", "mismatch/", "routing/"))
        }
        assert len(values) > 10
        assert found["batch/planned"] == 1.0
        close = {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in values.items()}
        close |= {name: value for name, value in values.items() if name.startswith("routing/") or mode == "r2"}
        assert {name: found[name] for name in values} == close
