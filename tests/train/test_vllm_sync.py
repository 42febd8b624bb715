"""Updates by vLLM's own transfer engines: what servers are asked, what a failure leaves, what must be installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from moe_replay.errors import EngineError, MissingExtraError
from moe_replay.rollout.pool import EnginePool
from moe_replay.rollout.types import SamplingParams
from moe_replay.rollout.vllm import transfer_engines as vllm_transfer_engines
from moe_replay.rollout.vllm.transfer_engines import Server as Waiting
from moe_replay.rollout.vllm.transfer_engines import find_rendezvous, require_engine
from moe_replay.rollout.weights.source import IteratorSource
from moe_replay.train import vllm_sync
from moe_replay.train.config.weights_section import WeightsConfig
from moe_replay.train.synced_engine import SyncedEngine
from moe_replay.train.weight_sync import EngineSync
from tests.rollout.test_plain_vllm_engine import PROBE, Server

pytest.importorskip("starlette", reason="the stand-in for the server needs starlette, which comes with vLLM")

WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(6.0),
    "model.layers.0.weight": torch.ones(3),
    "model.layers.1.weight": torch.full((3,), 2.0),
    "lm_head.weight": torch.zeros(2),
}


class Fleet(Server):
    """A `vllm serve` that was started for a transfer engine."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.config["weight_transfer_config"] = {"backend": kind}
        self.told: list[Any] = []

    def _content(self, path: str, body: Any) -> Any:
        if path == "/get_world_size":
            return {"world_size": 2}
        if path in ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"):
            assert self.paused
            self.told.append((path, body))
            return {}
        return super()._content(path, body)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.told]


class Side:
    """What vLLM's trainer side does on a rank, without its bytes: `sharded_rdt_trainer.py` of 0.30."""

    made: ClassVar[list[Side]] = []

    def __init__(self, kind: str, shares: Any, client: Any, rendezvous: dict[str, Any], rank: int, ranks: int) -> None:
        self.shares, self.client, self.rendezvous = shares, client, rendezvous
        self.sent: dict[str, Tensor] = {}
        self.is_open = True
        self.made.append(self)
        client.init_weight_transfer_engine({"names": [info.name for info in shares.metadata()]})

    def send_weights(self) -> None:
        self.client.start_weight_update()
        self.client.update_weights({})
        for names, tensors in self.shares.iter_groups():
            self.sent |= dict(zip(names, tensors, strict=True))
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.is_open = False


@pytest.fixture(autouse=True)
def sides(monkeypatch: pytest.MonkeyPatch) -> list[Side]:
    monkeypatch.setattr(vllm_sync, "require_engine", lambda kind: None)
    monkeypatch.setattr(vllm_sync, "trainer_side", Side)
    monkeypatch.setattr(Side, "made", [])
    return Side.made


@pytest.fixture
def servers() -> list[Fleet]:
    return [Fleet("sharded_rdt"), Fleet("sharded_rdt")]


@pytest.fixture
def engine(servers: list[Fleet]) -> Iterator[SyncedEngine]:
    with ExitStack() as stack:
        clients = [stack.enter_context(server.client()) for server in servers]
        yield SyncedEngine(stack.enter_context(EnginePool(clients, any_version=True, max_backoff_s=0.1)))


def sync() -> EngineSync:
    return EngineSync(WeightsConfig(kind="sharded_rdt", timeout_s=60), torch.device("cpu"))


INIT, START, UPDATE, FINISH = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)


def test_all_servers_are_updated_by_one_send_of_the_ranks(
    servers: list[Fleet], engine: SyncedEngine, sides: list[Side]
) -> None:
    by_vllm = sync()
    report = by_vllm.send(IteratorSource(WEIGHTS.items), engine, 1, PROBE)
    assert (report.kind, report.nbytes) == ("sharded_rdt", sum(tensor.nbytes for tensor in WEIGHTS.values()))
    (side,) = sides
    assert side.sent.keys() == WEIGHTS.keys()
    assert (side.rendezvous["workers"], side.rendezvous["servers"]) == (4, 2)
    inits = [server.told[0][1]["init_info"] for server in servers]
    assert sorted(one["replica_rank"] for one in inits) == [0, 1]
    assert all(one["num_replicas"] == 2 and one["names"] == list(WEIGHTS) for one in inits)
    by_vllm.send(IteratorSource(WEIGHTS.items), engine, 2, PROBE)
    assert len(sides) == 1, "it is kept"
    for server in servers:
        assert server.paths == [INIT, START, UPDATE, FINISH, START, UPDATE, FINISH]
        assert not server.paused
        assert server.version.startswith("2@")
    samples = engine.generate([[5, 6]], SamplingParams())
    assert {sample.weight_version for [sample] in samples} == {2}


def test_a_server_that_restarted_is_told_of_the_trainer_again(
    servers: list[Fleet], engine: SyncedEngine, sides: list[Side]
) -> None:
    by_vllm = sync()
    by_vllm.send(IteratorSource(WEIGHTS.items), engine, 1, PROBE)
    servers[1].version = "default"
    by_vllm.send(IteratorSource(WEIGHTS.items), engine, 2, PROBE)
    assert [side.is_open for side in sides] == [False, True]
    assert all(server.paths.count(INIT) == 2 for server in servers)


@pytest.mark.parametrize("failing", [UPDATE, INIT, "/pause"])
def test_after_a_failure_no_server_samples_until_all_have_the_weights(
    servers: list[Fleet], engine: SyncedEngine, sides: list[Side], failing: str
) -> None:
    by_vllm = sync()
    servers[1].failing = {failing}
    with pytest.raises(EngineError, match=f"no {failing}"):
        by_vllm.send(IteratorSource(WEIGHTS.items), engine, 1, PROBE)
    if failing == UPDATE:
        assert servers[0].paths[-1] == FINISH, "or it would refuse the next update"
        assert not sides[0].is_open
    assert not servers[0].paused
    with pytest.raises(EngineError):
        engine.generate([[5, 6]], SamplingParams())
    servers[1].failing = set()
    by_vllm.send(IteratorSource(WEIGHTS.items), engine, 2, PROBE)
    assert all(sample.weight_version == 2 for [sample] in engine.generate([[5, 6]] * 3, SamplingParams()))


def test_a_server_that_was_not_started_for_it_is_refused() -> None:
    text = r"not started to take weights by sharded_rdt.*executor-backend ray"
    with (
        Fleet("nccl").client() as client,
        EnginePool([client], any_version=True) as pool,
        pytest.raises(EngineError, match=text),
    ):
        sync().send(IteratorSource(WEIGHTS.items), SyncedEngine(pool), 1, PROBE)


# ---- what must be there ---------------------------------------------------------------------------------------------


def test_servers_that_an_engine_cannot_serve() -> None:
    two = {"http://a": Waiting(print, 2), "http://b": Waiting(print, 4)}
    with pytest.raises(EngineError, match="servers of one size"):
        find_rendezvous("sharded_rdt", two, lambda url: ("127.0.0.1", 1))
    same = dict.fromkeys(two, Waiting(print, 2))
    with pytest.raises(EngineError, match=r"one server.*2 servers"):
        find_rendezvous("nccl_m2n", same, lambda url: ("127.0.0.1", 1))


@pytest.mark.parametrize(
    ("kind", "there", "text"),
    [
        ("sharded_rdt", {}, r"vLLM 0\.30 or later.*found no vLLM.*vllm>=0\.30"),
        ("nccl_m2n", {"vllm": "0.30.0"}, r"vLLM 0\.32 or later.*found vLLM 0\.30\.0.*vllm>=0\.32,<0\.33"),
        ("sharded_rdt", {"vllm": "0.30.0", "engine": ""}, r"Ray 2\.56 or later.*found no Ray.*ray>=2\.56"),
        ("sharded_rdt", {"vllm": "0.30.0", "engine": "", "ray": "2.49.1"}, r"found Ray 2\.49\.1"),
        ("sharded_rdt", {"vllm": "0.30.0", "engine": "", "ray": "2.56.0"}, "needs NIXL.*pip install nixl"),
        ("nccl_m2n", {"vllm": "0.32.0", "engine": ""}, r"nccl-extensions.*2\.30\.5"),
        ("sharded_rdt", {"vllm": "0.30.0", "engine": "", "ray": "2.56.0", "nixl": "1"}, None),
        ("nccl_m2n", {"vllm": "0.32.0", "engine": "", "nccl": "1", "nccl.m2n": "1"}, None),
    ],
)
def test_what_is_missing_is_named_at_start(
    kind: str, there: dict[str, str], text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _ = vllm_transfer_engines.ENGINES[kind]
    there = {module if name == "engine" else name: found for name, found in there.items()}
    monkeypatch.setattr(vllm_transfer_engines, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(vllm_transfer_engines, "_installed", lambda name: there.get(name, ""))
    if text is None:
        require_engine(kind)
        return
    with pytest.raises(MissingExtraError, match=text):
        require_engine(kind)


def test_here_they_are_refused_when_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("ray") is not None:
        pytest.skip("Ray is installed")
    monkeypatch.setattr(vllm_sync, "require_engine", require_engine)
    with pytest.raises(MissingExtraError):
        sync()


# ---- vLLM's own trainer side ----------------------------------------------------------------------------------------


class Actor:
    """vLLM's actor beside a rank, without Ray and GPUs: what is published is freed when it is asked for."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.published: dict[int, list[str]] = {}

    def __call__(self, method: str, *arguments: Any) -> Any:
        return list(self.engine._inflight) if method in ("wait_freed", "end_sync") else None

    def publish(self, number: int, entries: Any) -> None:
        self.published[number] = list(entries[1])


def test_vllm_s_own_trainer_side_takes_the_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run: the gather loop and the ownership table of the installed vLLM. Replaced: Ray, and packing on a GPU."""
    pytest.importorskip("vllm.distributed.weight_transfer.base", reason="vLLM is not installed here")
    if importlib.util.find_spec("ray") is None:
        ray: Any = type(sys)("ray")
        ray.method = lambda **_: lambda function: function
        monkeypatch.setitem(sys.modules, "ray", ray)
    from vllm.distributed.weight_transfer import sharded_rdt_trainer as theirs

    from moe_replay.rollout.vllm.layer_shares import LayerShares

    engine_class = theirs.ShardedRDTTrainerWeightTransferEngine
    packed: dict[str, Tensor] = {}
    actors: list[Actor] = []

    def spawn(self: Any, served: list[str]) -> None:
        assert served == sorted(WEIGHTS)
        actors.append(Actor(self))
        self._server_name = "actor"

    def pack(self: Any, small: list[tuple[str, Tensor]], slot: int) -> Any:
        packed.update(small)
        return {}, {name: () for name, _ in small}, dict(small)

    monkeypatch.setattr(engine_class, "_spawn_server", spawn)
    monkeypatch.setattr(engine_class, "_pack_group_for_export", pack)
    monkeypatch.setattr(engine_class, "_rpc", lambda self, *arguments: actors[0](*arguments))
    monkeypatch.setattr(engine_class, "_publish_async", lambda self, *group: actors[0].publish(*group))
    monkeypatch.setattr(engine_class, "_await_publish", lambda self, published: None)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(vllm_transfer_engines, "require_ray_worker", lambda: None)
    told: list[str] = []
    servers = {"http://a": Waiting(lambda path, body: told.append(path), 2)}
    client = vllm_transfer_engines.FleetClient("sharded_rdt", servers)
    rendezvous = find_rendezvous("sharded_rdt", servers, lambda url: ("127.0.0.1", 1)) | {"timeout_s": 60.0}
    shares = LayerShares(IteratorSource(WEIGHTS.items))
    side = vllm_transfer_engines.trainer_side("sharded_rdt", shares, client, rendezvous, 0, 1)
    for number in range(2):
        packed.clear()
        shares.use(IteratorSource({name: tensor + number for name, tensor in WEIGHTS.items()}.items))
        side.send_weights()
        shares.finish()
        assert all(torch.equal(packed[name], tensor + number) for name, tensor in WEIGHTS.items())
    assert [name for number in range(4) for name in actors[0].published[number]] == list(WEIGHTS)
    assert told == [INIT, START, UPDATE, FINISH, START, UPDATE, FINISH]


def test_vllm_s_own_trainer_side_of_nccl_m2n_takes_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run: the plan, its checks and the send loop of vLLM 0.32. Replaced: NCCL and its extension."""
    reason = "the installed vLLM has no nccl_m2n"
    theirs = pytest.importorskip("vllm.distributed.weight_transfer.m2n_trainer", reason=reason)

    from moe_replay.rollout.vllm.layer_shares import LayerShares

    sent: list[Tensor] = []
    stream = SimpleNamespace(synchronize=lambda: None)
    library = SimpleNamespace(
        Handle=SimpleNamespace(create=lambda config: "handle"),
        Config=lambda max_cta: None,
        reshard=lambda shard, *_, **__: sent.append(shard),
    )
    monkeypatch.setattr(theirs, "import_m2n", lambda: library)
    monkeypatch.setattr(theirs, "trainer_init", lambda rendezvous, rank: "group")
    monkeypatch.setattr(theirs, "publish_destination_placements", lambda group, root, own, count: [None] * count)
    for name in ("comm_ptr", "to_mesh", "to_placements"):
        monkeypatch.setattr(theirs, name, lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: stream)
    told: list[tuple[str, Any]] = []
    servers = {"http://a": Waiting(lambda path, body: told.append((path, body)), workers=4, tensor=2)}
    client = vllm_transfer_engines.FleetClient("nccl_m2n", servers)
    rendezvous = find_rendezvous("nccl_m2n", servers, lambda url: ("127.0.0.1", 1)) | {"timeout_s": 60.0}
    shares = LayerShares(IteratorSource(WEIGHTS.items), replicated=True)
    side = vllm_transfer_engines.trainer_side("nccl_m2n", shares, client, rendezvous, 0, 1)
    side.send_weights()
    shares.finish()
    assert all(torch.equal(one, tensor) for one, tensor in zip(sent, WEIGHTS.values(), strict=True))
    assert [path for path, _ in told] == [INIT, START, UPDATE, FINISH]
    plan = told[0][1]["init_info"]
    assert (plan["world_size"], plan["rank_offset"], plan["dst_mesh_dims"]) == (5, 1, [2, 2])
