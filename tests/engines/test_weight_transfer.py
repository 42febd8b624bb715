"""Weights to servers in processes of their own, by memory and by broadcast: what arrives, and what faults leave."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.weight_sources import IteratorSource

pytest.importorskip("uvicorn", reason="the server's own dependencies come with vLLM")

from moe_replay.engines.base import StartRequest
from moe_replay.engines.pool import EnginePool
from moe_replay.engines.server import engine_processes
from moe_replay.engines.server.client import RolloutClient
from moe_replay.errors import EngineError, MoeReplayError
from moe_replay.records import SamplingParams
from moe_replay.train.config.sections import WeightSyncConfig
from moe_replay.train.sync.synced_engine import SyncedEngine
from moe_replay.train.sync.weight_sync import EngineSync
from moe_replay.weights.checkpoint import checkpoint_tensors
from moe_replay.weights.identity import Probe
from moe_replay.weights.source import Group, TensorInfo
from tests.combinations import with_whole_runs
from tests.engines import dying_trainer
from tests.engines.tiny import assert_sampled_from, tiny_model
from tests.faults.forked import Forked
from tests.faults.processes import LIMIT_S

pytestmark = pytest.mark.engine

TOKEN = "open sesame"
PROMPT = list(range(3, 19))
KINDS = ("ipc", "nccl")
SERVERS = 4


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """Four servers of one model, and their processes; the last tests end the last two of them.

    They are forked; test_engine_processes.py has those that a trainer starts.
    """
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen3_moe").save_pretrained(folder)
    request = dataclasses.asdict(StartRequest(model=str(folder), dtype="float32"))
    asked = {"engine": "transformers", "request": request, "token": TOKEN, "host": "127.0.0.1"}
    with ExitStack() as stack:
        pipes = [Pipe(duplex=False) for _ in range(SERVERS)]
        started = [stack.enter_context(Forked(serve, asked, ready, environment={})) for _, ready in pipes]
        for process in started:
            stack.callback(process.kill)
        ports = [port(*pipe) for pipe in pipes]
        yield {f"http://127.0.0.1:{port}": process.pid for port, process in zip(ports, started, strict=True)}


def serve(asked: dict[str, Any], ready: Connection) -> None:
    """Run what a trainer starts, in a fork."""
    asked |= {"parent": os.getppid(), "ready": os.dup(ready.fileno())}
    ready.close()
    sys.stdin = io.StringIO(json.dumps(asked) + "\n")
    engine_processes.main()


def port(said: Connection, ready: Connection) -> int:
    ready.close()  # the server alone has it now
    with said, os.fdopen(os.dup(said.fileno())) as lines:
        return int(lines.readline())


@pytest.fixture
def urls(servers: dict[str, int]) -> list[str]:
    return list(servers)


def clients(urls: Sequence[str]) -> list[RolloutClient]:
    return [RolloutClient(url, token=TOKEN) for url in urls]


def state(seed: int) -> dict[str, Tensor]:
    """Weights under their names in the checkpoint."""
    return {name: tensor.detach().clone() for name, tensor in checkpoint_tensors(tiny_model("qwen3_moe", seed))}


def probe(seed: int) -> Probe:
    """What these weights say of the prompt."""
    model = tiny_model("qwen3_moe", seed)
    with torch.no_grad():
        scores = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    logprobs = scores.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].numpy()
    return Probe(token_ids=PROMPT, logprobs=logprobs, tolerance=1e-4)


def sync(kind: str) -> EngineSync:
    config = WeightSyncConfig(transport=kind, timeout_s=60)  # type: ignore[arg-type]
    return EngineSync(config, torch.device("cpu"))


@pytest.mark.parametrize("number", with_whole_runs([2, 4], [4]))
@pytest.mark.parametrize("kind", KINDS)
def test_every_server_gets_the_weights_that_http_would_send(urls: list[str], kind: str, number: int) -> None:
    seed = 10 * number + KINDS.index(kind)
    with EnginePool(clients(urls[:number]), any_version=True) as pool:
        engine = SyncedEngine(pool)
        weights = state(seed)
        sent = sync("http").send(IteratorSource(weights.items), engine, 1, probe(seed))
        by_http = [client.prompt_logprobs(PROMPT) for client in clients(urls[:number])]
        sync("http").send(IteratorSource(state(1).items), engine, 2, probe(1))
        report = sync(kind).send(IteratorSource(weights.items), engine, 3, probe(seed))
        assert report.transport == kind
        assert report.nbytes == sent.nbytes == sum(tensor.nbytes for tensor in weights.values())
        assert set(report.metrics()) == {"time/weights", "weights/gb", "time/weights_gb_per_second"}
        for client, before in zip(clients(urls[:number]), by_http, strict=True):
            assert client.weight_version == 3
            assert np.array_equal(client.prompt_logprobs(PROMPT), before)


class Changed:
    """A source whose tensors differ from what the engine knows, or that fails."""

    def __init__(self, tensors: dict[str, Tensor], fails_at: str = "") -> None:
        self._tensors, self._fails_at = tensors, fails_at

    def metadata(self) -> Sequence[TensorInfo]:
        return [TensorInfo.of(name, tensor) for name, tensor in self._tensors.items()]

    def groups(self, receivers: Collection[int] = (0,)) -> Iterator[Group]:
        for name, tensor in self._tensors.items():
            if name == self._fails_at:
                raise MoeReplayError("the trainer has no memory left")
            yield [(name, tensor)]


def refuses_to_sample(url: str) -> bool:
    client = RolloutClient(url, token=TOKEN)
    with pytest.raises(EngineError, match="did not succeed"):
        client.generate([PROMPT], SamplingParams(max_tokens=2))
    return True


@pytest.mark.parametrize("kind", ["http", *KINDS])
@pytest.mark.parametrize("fault", ["shape", "lost", "unknown", "sender"])
def test_after_a_fault_no_server_samples_until_it_has_all_weights(urls: list[str], kind: str, fault: str) -> None:
    used = urls[:2]
    weights = state(3)
    broken = dict(weights)
    name = next(one for one in weights if "layers.2" in one and "down_proj" in one)
    if fault == "shape":
        broken[name] = weights[name][:-1]
    elif fault == "lost":
        del broken[name]
    elif fault == "unknown":
        broken["model.layers.2.nothing"] = weights[name]
    source = Changed(broken, name if fault == "sender" else "")
    said = {"shape": "wrong shape of", "lost": "missing", "unknown": "no such parameter", "sender": "no memory left"}[
        fault
    ]
    with EnginePool(clients(used), any_version=True) as pool:
        engine = SyncedEngine(pool)
        with pytest.raises(MoeReplayError, match=said):
            sync(kind).send(source, engine, 5, probe(3))
        assert all(refuses_to_sample(url) for url in used)
        sync(kind).send(IteratorSource(weights.items), engine, 6, probe(3))
        assert {sample.weight_version for [sample] in engine.generate([PROMPT] * 4, SamplingParams(max_tokens=2))} == {
            6
        }


@pytest.mark.parametrize("kind", ["http", *KINDS])
def test_a_trainer_killed_in_mid_sync_leaves_servers_that_refuse_to_sample(
    urls: list[str], kind: str, tmp_path: Path
) -> None:
    used, weights = urls[:2], state(8)
    with EnginePool(clients(used), any_version=True) as pool:
        sync("http").send(IteratorSource(state(9).items), SyncedEngine(pool), 4, probe(9))
    file = str(tmp_path / "weights.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)
    with Forked(dying_trainer.main, file, kind, *used, environment={}) as trainer:
        told, _ = trainer.communicate(LIMIT_S)
    assert trainer.returncode == -signal.SIGKILL, told
    for url in used:
        refuses_at_last(url, before=9)
    with EnginePool(clients(used), any_version=True) as pool:
        engine = SyncedEngine(pool)
        sync(kind).send(IteratorSource(weights.items), engine, 6, probe(8))
        samples = engine.generate([PROMPT] * 4, SamplingParams(max_tokens=2))
    assert {sample.weight_version for [sample] in samples} == {6}


def refuses_at_last(url: str, before: int) -> None:
    """Ask until the server refuses; if it samples, then with all of the weights that it had before."""
    client = RolloutClient(url, token=TOKEN)
    for _ in range(600):
        try:
            ((sample,),) = client.generate([PROMPT], SamplingParams(max_tokens=2))
        except EngineError as refused:
            if "did not succeed" in str(refused):
                return
        else:  # the request came before the update's
            assert_sampled_from(tiny_model("qwen3_moe", before), sample)
        time.sleep(0.2)
    raise AssertionError("the server still waits for the rest of the weights")


class Killing(Changed):
    """A source that ends a server when half of its tensors have been read."""

    def __init__(self, tensors: dict[str, Tensor], pid: int) -> None:
        super().__init__(tensors)
        self._pid = pid

    def groups(self, receivers: Collection[int] = (0,)) -> Iterator[Group]:
        for number, group in enumerate(super().groups(receivers)):
            if number == len(self._tensors) // 2 and self._pid:
                os.kill(self._pid, signal.SIGKILL)
                self._pid = 0
            yield group


@pytest.mark.parametrize("kind", [*KINDS, "http"])
def test_a_server_killed_in_mid_sync_does_not_keep_the_others_from_their_weights(
    servers: dict[str, int], urls: list[str], kind: str
) -> None:
    kept, ended = urls[0], urls[{"http": 1, "ipc": 2, "nccl": 3}[kind]]
    with EnginePool(clients([ended, kept]), any_version=True) as pool:
        engine = SyncedEngine(pool)
        sync(kind).send(Killing(state(7), servers[ended]), engine, 4, probe(7))
        samples = engine.generate([PROMPT] * 2, SamplingParams(max_tokens=2))
        assert {sample.weight_version for [sample] in samples} == {4}
        left = RolloutClient(kept, token=TOKEN)
        assert np.allclose(left.prompt_logprobs(PROMPT), probe(7).logprobs, atol=1e-4)
