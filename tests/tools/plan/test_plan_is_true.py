"""A plan is what the layouts, batches, bytes and process groups of real ranks turn out to be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_replay import MoeTopology, RouteBatch, RouteTrace, TokenLayout
from moe_replay.distributed import ranks
from moe_replay.distributed.collectives import broadcast_bytes, open_control_group
from moe_replay.records import FinishReason, Trajectory
from moe_replay.routes import MoeLayer
from moe_replay.tools.plan import Cluster, Parallel, RouteBytes, Work, plan_layout
from moe_replay.tools.plan.layout import in_flight
from moe_replay.train.trajectories.store import InProcessStore, RankStore
from moe_replay.train.trajectories.wire import (
    HEADER_BYTES,
    batch_from_bytes,
    batch_to_bytes,
    table_bytes,
)
from tests.distributed.harness import run_ranks
from tests.support.trajectory_bytes import trajectories_to_bytes

SIZES = st.sampled_from([1, 2, 4])


def topology(layers: int, experts: int = 8, top_k: int = 2, first: int = 1) -> MoeTopology:
    return MoeTopology(layers, tuple(MoeLayer(layer, experts, top_k) for layer in range(first, layers)))


def trace(tokens: int, of: MoeTopology, seed: int = 0, uncovered: int = 1) -> RouteTrace:
    random = np.random.default_rng(seed)
    choices = random.permuted(np.tile(np.arange(of.num_experts), (tokens, len(of.layers), 1)), axis=2)
    valid = np.arange(tokens) < tokens - uncovered
    ids = random.integers(0, 99, tokens)
    return RouteTrace(ids, choices[..., : of.top_k], of.layers, valid, num_experts=of.num_experts)


def layout_of(work: Work, parallel: Parallel, cp: int, tp: int) -> TokenLayout:
    """As routers/megatron_layout.py composes it, with the coordinates given."""
    multiple = parallel.column_multiple
    if work.packed:
        layout = TokenLayout.packed(work.lengths, pad_each_to_multiple_of=multiple)
    else:
        layout = TokenLayout.padded(work.lengths)
    layout = layout.pad_to(work.width, multiple_of=multiple)
    if parallel.cp > 1:
        layout = layout.context_parallel(cp, parallel.cp)
    if parallel.tp > 1:
        layout = layout.sequence_parallel(tp, parallel.tp)
    return layout.sequence_major()


@settings(max_examples=60)
@given(
    tp=SIZES,
    cp=SIZES,
    pp=SIZES,
    vpp=st.sampled_from([1, 2]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple),
    packed=st.booleans(),
    extra=st.sampled_from([None, 0, 1, 3]),
    experts=st.sampled_from([8, 300]),
    first=st.integers(0, 7),
)
def test_rows_layers_and_bytes_of_every_rank(tp, cp, pp, vpp, lengths, packed, extra, experts, first) -> None:
    of = topology(8, experts=experts, top_k=3, first=first)
    parallel = Parallel(tp=tp, cp=cp, pp=pp, vpp=vpp if pp > 1 else 1)
    work = Work(lengths=lengths, packed=packed, micro_batches=pp)
    if extra is not None:
        least = work.input_shape(parallel.column_multiple)[1]
        work = Work(lengths=lengths, packed=packed, micro_batches=pp, width=least + extra * parallel.column_multiple)
    plan = plan_layout(of, parallel, work)
    traces = [trace(length, of, seed) for seed, length in enumerate(lengths)]
    replayed: dict[tuple[int, int], list[int]] = {}
    for rank in range(parallel.world):
        planned = plan.rank(rank)
        where = planned.coordinates
        layout = layout_of(work, parallel, where["cp"], where["tp"])
        assert planned.rows == layout.num_rows
        assert planned.token_rows == layout.num_rows - layout.num_padding == plan.table["token_rows"][rank]
        assert plan.token_id_bytes == 4 * layout.fed.size
        held = 0
        for layers in filter(None, planned.routing_layers):
            batch = RouteBatch.from_traces(traces, layout, layers)
            held += batch.routed_experts.nbytes + batch.valid[:1].nbytes
        assert planned.batch_bytes == held == plan.table["batch_bytes"][rank]
        layers = [layer for chunk in planned.routing_layers for layer in chunk]
        replayed.setdefault((where["cp"], where["tp"]), []).extend(layers)
    assert all(sorted(layers) == list(of.layers) for layers in replayed.values())
    assert plan.token_rows.sum() == work.tokens


@settings(max_examples=60)
@given(
    cp=st.sampled_from([1, 2, 3, 4]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple),
    packed=st.booleans(),
)
def test_rows_of_every_rank_of_fsdp2(cp, lengths, packed) -> None:
    parallel, work = Parallel(cp=cp, dp=2, ulysses=True), Work(lengths=lengths, packed=packed)
    plan = plan_layout(topology(4), parallel, work)
    whole = TokenLayout.packed(lengths) if packed else TokenLayout.padded(lengths)
    for rank in range(parallel.world):  # as FsdpBackend.layout composes it
        layout = whole.pad_to(multiple_of=cp).context_parallel(rank % cp, cp, "contiguous")
        assert plan.rank(rank).rows == layout.num_rows
        assert plan.rank(rank).token_rows == layout.num_rows - layout.num_padding
        assert plan.token_id_bytes == 4 * layout.fed.size
    assert plan.token_rows.sum() == work.tokens


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 1200),
    layers=st.integers(1, 5),
    experts=st.sampled_from([4, 128, 256, 257, 512, 1024]),
    whole=st.booleans(),
)
def test_bytes_on_the_wire_are_those_of_the_encoder(tokens, layers, experts, whole) -> None:
    of = topology(layers, experts, top_k=3, first=0)
    encoded = trace(tokens, of, uncovered=not whole).to_bytes()
    assert RouteBytes(of).trace(tokens, whole=whole) == len(encoded)


def test_prompts_of_a_group_travel_once() -> None:
    of = topology(4)
    work = Work(lengths=(50, 60, 70, 80), prompt=30, group=4, micro_batches=3)
    traces = [trace(length, of) for length in work.lengths]
    expected = len(traces[0][:30].to_bytes()) + sum(len(each[30:].to_bytes()) for each in traces)
    plan = plan_layout(of, Parallel(dp=2), work)
    assert plan.wire_bytes["step"] == 2 * 3 * expected
    alone = plan_layout(of, Parallel(dp=2), Work(lengths=work.lengths, micro_batches=3)).wire_bytes
    assert alone["step"] == 2 * 3 * sum(len(each.to_bytes()) for each in traces)
    assert alone["step_as_base64_int32"] == 2 * 3 * sum(
        -(-(length - 1) * 4 * 2 * 4 // 3) * 4 for length in work.lengths
    )


def trajectory(number: int, tokens: int, of: MoeTopology) -> Trajectory:
    """A prompt of three tokens and what one version of the weights sampled."""
    routes = trace(tokens, of, number)
    return Trajectory(
        row=number,
        group=number,
        token_ids=routes.token_ids,
        logprobs=np.zeros(tokens, np.float32),
        versions=np.where(np.arange(tokens) < 3, -1, 0).astype(np.int64),
        trace=routes,
        finish_reason=FinishReason.STOP,
        reward=1.0,
    )


def test_a_node_takes_the_shares_that_its_ranks_need() -> None:
    of = topology(4, first=0)
    one = len(trajectories_to_bytes([trajectory(0, 16, of)], of.layers[:2]))
    plan = plan_layout(of, Parallel(tp=2, pp=2, dp=4), Work(lengths=(16,)), cluster=Cluster(ranks_per_node=4, gbit=1.0))
    # ranks 0-3 are dp 0, 0, 1, 1 of the first stage; the other three nodes need two shares of a stage each as well
    assert plan.wire_bytes["fullest_node"] == 2 * one
    assert plan.wire_bytes["all_nodes"] == 3 * 2 * one
    assert plan.wire_seconds == pytest.approx((plan.wire_bytes["step"] + 6 * one) * 8 / 1e9)


# ---- what the store moves --------------------------------------------------------------------------------------------

STORED = topology(4)
LENGTHS, MICRO_BATCHES = (40, 25), 3


def moved(parallel: dict[str, int], ranks_per_node: int) -> list[int]:
    """Bytes that this rank receives in a step, that rank 0 sends to other nodes, that it holds, and headers of all."""
    layout = Parallel(**parallel)
    plan = plan_layout(STORED, layout, Work(lengths=LENGTHS, micro_batches=MICRO_BATCHES))
    planned = plan.rank(ranks.rank())
    layers = tuple(sorted(sum(planned.routing_layers, ())))
    each = len(LENGTHS) * MICRO_BATCHES
    with open_control_group():
        own = planned.coordinates["dp"]
        alone = layout.world == 1
        store = InProcessStore() if alone else RankStore(own, layers, 60.0, machine=str(ranks.rank() // ranks_per_node))
        whole = [trajectory(i, LENGTHS[i % len(LENGTHS)], STORED) for i in range(each * layout.dp)]
        batch = batch_from_bytes(broadcast_bytes(batch_to_bytes(store.put(whole)) if ranks.rank() == 0 else None))
        store.get(batch, range(own * each, (own + 1) * each), layers)
        ranks.barrier()
        sent = 0 if isinstance(store, InProcessStore) else store.sent_bytes
        sections = batch.sections
        held = sum(size for _, size in sections) - len(sections) * table_bytes(len(whole))
        store.close()
    return [store.received_bytes, sent, held, HEADER_BYTES * len(batch.headers)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("parallel", "ranks_per_node"),
    [
        ({}, 8),
        ({"dp": 2}, 8),
        ({"dp": 4}, 2),
        ({"pp": 2, "dp": 2}, 1),
        ({"tp": 2, "pp": 2, "dp": 2}, 4),
        ({"cp": 2, "dp": 4}, 2),
    ],
)
def test_bytes_of_a_step_are_those_that_the_store_moves(parallel: dict[str, int], ranks_per_node: int) -> None:
    """On 1, 2, 4 and 8 ranks."""
    layout = Parallel(**parallel)
    work = Work(lengths=LENGTHS, micro_batches=MICRO_BATCHES)
    plan = plan_layout(STORED, layout, work, cluster=Cluster(ranks_per_node=ranks_per_node))
    every = run_ranks(layout.world, moved, parallel, ranks_per_node)
    assert [received for received, *_ in every] == plan.table["fetched_bytes"].tolist()
    assert max(received for received, *_ in every) == plan.wire_bytes["rank"]
    _, sent, held, headers = every[0]
    assert sent == plan.wire_bytes["all_nodes"]
    assert held == plan.wire_bytes["store"]
    assert headers == plan.wire_bytes["headers"]


def test_sixteen_thousand_ranks_are_planned_at_once() -> None:
    plan = plan_layout(STORED, Parallel(tp=8, pp=4, dp=512), Work(lengths=(4096,), micro_batches=8))
    assert plan.parallel.world == 16384
    assert plan.wire_bytes["rank"] * 4 * 512 == plan.wire_bytes["store"]
    # every share has a node of its own, and that of rank 0 is the only one that fetches none
    assert plan.wire_bytes["all_nodes"] == (4 * 512 - 1) * plan.wire_bytes["fullest_node"]


# ---- Megatron-Core's own groups, layers and schedules ----------------------------------------------------------------


def groups_of(values: dict[str, np.ndarray], names: str) -> list[list[int]]:
    """Ranks that differ in these coordinates only."""
    others = [name for name in values if name not in names.split("-")]
    keys = np.stack([values[name] for name in others], axis=1)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    return sorted(np.flatnonzero(group.ravel() == number).tolist() for number in range(group.max() + 1))


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(tp=2, cp=2, pp=2, dp=2, ep=4, etp=1),
        Parallel(tp=2, pp=4, dp=4, ep=2, etp=2),
        Parallel(cp=4, pp=2, dp=3, ep=6, etp=1),
        Parallel(tp=4, dp=2, ep=1),
        Parallel(tp=4, cp=2, pp=3, dp=2, ep=16, etp=1),
    ],
    ids=str,
)
def test_groups_are_those_of_megatron(parallel: Parallel) -> None:
    state = pytest.importorskip("megatron.core.parallel_state")
    where = parallel.coordinates()
    dense, expert = (
        {name: where[name] for name in names} for names in (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp"))
    )
    generator = state.RankGenerator(
        tp=parallel.tp, ep=1, dp=parallel.dp, pp=parallel.pp, cp=parallel.cp, order="tp-cp-ep-dp-pp"
    )
    for names in ("tp", "cp", "dp", "pp", "tp-cp", "dp-cp", "tp-pp"):
        assert groups_of(dense, names) == sorted(map(sorted, generator.get_ranks(names)))
    generator = state.RankGenerator(
        tp=parallel.expert_tensor,
        ep=parallel.ep,
        dp=parallel.expert_data,
        pp=parallel.pp,
        cp=1,
        order="tp-cp-ep-dp-pp",
    )
    for ours, theirs in (("etp", "tp"), ("ep", "ep"), ("edp", "dp"), ("pp", "pp"), ("etp-ep", "tp-ep")):
        assert groups_of(expert, ours) == sorted(map(sorted, generator.get_ranks(theirs)))


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 1), (2, 2), (2, 6), (3, 4), (4, 3)])
def test_layers_of_a_stage_are_those_of_megatron(pp: int, vpp: int) -> None:
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    parallel = Parallel(pp=pp, vpp=vpp)
    sizes = parallel.megatron_settings() | {"pipeline_dtype": "float32"}
    config = TransformerConfig(num_layers=24, hidden_size=8, num_attention_heads=1, **sizes)
    for stage, chunks in enumerate(parallel.stage_layers(24)):
        for chunk, layers in enumerate(chunks):
            numbered = chunk if vpp > 1 else None
            offset = get_transformer_layer_offset(config, numbered, stage)
            count = block.get_num_layers_to_build(config, numbered, stage)
            assert layers == range(offset, offset + count)


def test_layers_of_an_uneven_pipeline_are_those_of_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    from megatron.core.transformer.enums import LayerType

    monkeypatch.setattr(layouts.parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: 2)
    layout = layouts.PipelineParallelLayerLayout("Et*3|t*2|t|t*2L", 2)
    parallel = Parallel(pp=2, vpp=2, chunk_layers=(3, 2, 1, 2))
    for stage in range(2):
        for chunk in range(2):
            placed = layout.get_layer_id_list(LayerType.decoder, chunk, stage)
            assert list(parallel.stage_layers(8)[stage][chunk]) == placed


class _Stage:
    """What a schedule asks its communicator for."""

    def __init__(self, parallel: Parallel, stage: int) -> None:
        self.pp_group = self
        self.virtual_pipeline_model_parallel_size = parallel.vpp if parallel.vpp > 1 else None
        self.size, self.rank = lambda: parallel.pp, lambda: stage


@pytest.mark.parametrize(("pp", "vpp", "batches"), [(1, 1, 8), (4, 1, 8), (4, 1, 2), (2, 2, 4), (4, 3, 8), (8, 4, 8)])
def test_micro_batches_in_flight_are_those_of_megatron(pp: int, vpp: int, batches: int) -> None:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    parallel = Parallel(pp=pp, vpp=vpp)
    for stage in range(pp):
        counts = schedules.get_pp_rank_microbatches(batches, vpp, pp, p2p_communicator=_Stage(parallel, stage))
        total, _, ahead, _ = counts
        assert in_flight(parallel, stage, batches) == min(ahead + 1, total)
