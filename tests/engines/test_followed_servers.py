"""A second process that samples from servers which the first one updates: SGLang, and a plain `vllm serve`.

That of `moe-replay rollout` is tested with whole runs (tests/train/test_workers.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the stand-ins for servers need starlette, which comes with vLLM")
pytest.importorskip("tenacity")

from moe_replay.engines.pool import EnginePool
from moe_replay.engines.sglang.client import SglangClient
from moe_replay.engines.vllm_serve.client import VllmServeClient
from moe_replay.errors import EngineUnavailableError
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.routes.topology import MoeTopology
from tests.engines import test_plain_vllm_engine as plain
from tests.engines import test_sglang_server as sglang

Update = Callable[[int, str], None]
Generate = Callable[[Any], list[list[Sample]]]


class Sglang(sglang.Stub):
    """Stamps its samples with the version that it has."""

    def __init__(self) -> None:
        super().__init__("glm4_moe")
        self.always = "length"

    def generate(self, request: dict[str, Any]) -> Any:
        answer = super().generate(request)
        if "logprob_start_len" not in request:
            answer["meta_info"] |= {"weight_version": self.version, "weight_versions": None}
        return answer


@contextmanager
def sglang_servers(folder: Path) -> Iterator[tuple[EnginePool, EnginePool, Update, Generate]]:
    stub, model = Sglang(), sglang.model("glm4_moe")
    model.save_pretrained(folder)
    prompt, params, _ = sglang.case("glm4_moe", "length")
    topology = MoeTopology.from_config(model.config)
    with stub.client(topology) as first:
        follower = SglangClient(first.url, topology=topology)
        with EnginePool([first]) as owner, EnginePool([follower], attempts=1) as pool:
            yield (
                owner,
                pool,
                lambda version, name: owner.update_weights(folder, version, weights_id=name),
                lambda engine: engine.generate([prompt], params),
            )


@contextmanager
def plain_servers(folder: Path) -> Iterator[tuple[EnginePool, EnginePool, Update, Generate]]:
    server = plain.Server()
    server.release = "0.32.0"
    with server.client(shared_folder=folder) as first:
        follower = VllmServeClient(first.url, plain.TOPOLOGY, vocabulary=20)
        with EnginePool([first]) as owner, EnginePool([follower], attempts=1) as pool:
            yield (
                owner,
                pool,
                lambda version, name: owner.update_weights(plain.WEIGHTS.items(), version, weights_id=name),
                lambda engine: engine.generate([[5, 6]], SamplingParams()),
            )


@pytest.mark.parametrize("servers", [sglang_servers, plain_servers])
def test_samples_of_an_update_by_another_process_are_accepted_once_it_is_announced(
    servers: Any, tmp_path: Path
) -> None:
    with servers(tmp_path) as (owner, pool, update, generate):
        for version, name in ((4, "run-4-a"), (5, "run-5-b")):
            pool.follow_update(version, name)
            update(version, name)
            pool.follow_servers(owner.server_states)
            ((sample, *_), *_) = generate(pool)
            assert (sample.weight_version, sample.weights_id) == (version, name)
            assert sample.finish_reason is FinishReason.LENGTH
        update(6, "stranger-6")
        with pytest.raises(EngineUnavailableError, match=r"not sent|no engine of the pool"):
            generate(pool)


@pytest.mark.parametrize("servers", [sglang_servers, plain_servers])
def test_no_request_of_the_follower_runs_while_the_weights_change(servers: Any, tmp_path: Path) -> None:
    """One that was queued in the server would be sampled by weights that the probe has not verified yet."""
    with servers(tmp_path) as (owner, pool, update, generate):
        pool.follow_update(4, "run-4-a")
        done = threading.Event()
        thread = threading.Thread(target=lambda: (generate(pool), done.set()))
        thread.start()
        update(4, "run-4-a")
        assert not done.wait(0.3)
        pool.follow_servers(owner.server_states)
        assert done.wait(60)
        thread.join()
    assert pool._members[0].engine.drains
