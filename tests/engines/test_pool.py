"""Several servers as one engine. The servers are processes of their own, so that they can really be killed."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from moe_replay.engines.server.client import RolloutClient
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.errors import EngineError, EngineUnavailableError
from moe_replay.records import SamplingParams
from moe_replay.weights.checkpoint import checkpoint_tensors
from tests.engines.serving import responds, serving
from tests.engines.tiny import assert_sampled_from, tiny_model
from tests.faults.forked import Forked, fork_command
from tests.ports import reserved_port

pytest.importorskip("tenacity", reason="the pool needs tenacity")
pytest.importorskip("starlette", reason="the server's own dependencies come with vLLM")

TOKEN = "open sesame"
QUICK = {"cooldown_s": 0.2, "max_backoff_s": 0.5}


@contextmanager
def server_process(folder: Path) -> Iterator[tuple[Forked, str]]:
    """`moe-replay rollout` on a free port, ready to answer."""
    words = ["rollout", "--model", str(folder), "--engine", "transformers", "--dtype", "float32"]
    with (
        reserved_port() as port,
        fork_command(*words, "--port", str(port), environment={"MOE_REPLAY_TOKEN": TOKEN}) as process,
    ):
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def wait_until_healthy(process: Forked, client: RolloutClient) -> None:
    while not client.healthy():
        assert process.poll() is None, "the server did not start"
        time.sleep(0.1)


def pool_of(*urls: str, **options):
    from moe_replay.engines.pool import EnginePool

    return EnginePool([RolloutClient(url, token=TOKEN) for url in urls], **QUICK | options)


@pytest.mark.engine
@pytest.mark.whole_runs
def test_a_server_killed_in_mid_batch_loses_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tyro", reason="the command line needs tyro")
    model = tiny_model("olmoe")
    model.save_pretrained(tmp_path)
    with ExitStack() as stack:
        servers = [stack.enter_context(server_process(tmp_path)) for _ in range(2)]
        for process, url in servers:
            wait_until_healthy(process, stack.enter_context(RolloutClient(url, token=TOKEN)))
        pool = stack.enter_context(pool_of(*(url for _, url in servers), attempts=20))
        victim = servers[0][0]
        done = []
        prompts = [[1 + i, 2, 3] for i in range(40)]
        batch = threading.Thread(target=lambda: done.append(pool.generate(prompts, SamplingParams(n=2, max_tokens=24))))
        victim.send_signal(signal.SIGSTOP)  # it answers none of its requests before it is killed
        batch.start()
        while batch.is_alive() and not pool._members[0].active_requests:
            time.sleep(0.001)
        victim.kill()
        batch.join()
        (groups,) = done
        assert [group[0].prompt_ids.tolist() for group in groups] == prompts  # every prompt, once, in order
        assert all(len(group) == 2 for group in groups)
        assert Counter(len(sample.completion_ids) for group in groups for sample in group) == {24: 80}
        assert pool._members[0].down_until is not None
        assert_sampled_from(model, groups[0][0])
        assert_sampled_from(model, groups[-1][1])


@pytest.fixture
def engines() -> list[TransformersEngine]:
    return [TransformersEngine(tiny_model("olmoe"), max_length=64) for _ in range(2)]


@pytest.fixture
def urls(engines: list[TransformersEngine]) -> Iterator[list[str]]:
    from moe_replay.engines.server.app import build_app

    with ExitStack() as stack:
        yield [stack.enter_context(serving(build_app(engine, TOKEN))) for engine in engines]


def test_requests_are_shared_out(engines, urls) -> None:
    counts = [0, 0]
    for number, engine in enumerate(engines):
        sample = engine.generate_one

        async def counted(prompt, params, number=number, sample=sample):
            counts[number] += 1
            return await sample(prompt, params)

        engine.generate_one = counted
    with pool_of(*urls) as pool:
        assert len(pool.generate([[i + 1] for i in range(12)], SamplingParams(max_tokens=3))) == 12
    assert sum(counts) == 12
    assert min(counts) >= 3


def test_new_weights_reach_every_engine(engines, urls) -> None:
    newer = tiny_model("olmoe", seed=3)
    with pool_of(*urls) as pool:
        pool.update_weights(checkpoint_tensors(newer), 7)
        assert (pool.weight_version, [engine.weight_version for engine in engines]) == (7, [7, 7])
        for group in pool.generate([[i + 1, 5] for i in range(6)], SamplingParams(max_tokens=3)):
            assert group[0].weight_version == 7
            assert_sampled_from(newer, group[0])


def test_weights_that_are_refused_are_an_error(urls) -> None:
    tensors = [(name, tensor) for name, tensor in checkpoint_tensors(tiny_model("olmoe"))][:-1]
    with pool_of(*urls) as pool, pytest.raises(EngineError):
        pool.update_weights(iter(tensors), 7)


def test_an_engine_that_missed_an_update_is_left_out(engines, urls) -> None:
    """It answers again, but with older weights than the others."""
    with pool_of(*urls) as pool:
        pool._members[0].down_until = 0.0  # its cooldown is over, and its health may be checked
        engines[1].update_weights(checkpoint_tensors(tiny_model("olmoe", seed=3)), 7)
        pool._version = 7
        groups = pool.generate([[i + 1] for i in range(8)], SamplingParams(max_tokens=2))
        assert {sample.weight_version for group in groups for sample in group} == {7}
        assert pool._members[0].down_until is not None


def test_no_engine_left_says_so() -> None:
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(EngineUnavailableError, match=f"{url} cannot be reached"):
            pool_of(url)


def test_a_pool_needs_engines_of_one_model(urls) -> None:
    from moe_replay.engines.server.app import build_app

    with pytest.raises(EngineError, match="without engines"):
        pool_of()
    other = TransformersEngine(tiny_model("qwen3_moe"), max_length=64)
    with serving(build_app(other, TOKEN)) as url, pytest.raises(EngineError, match="different models") as caught:
        pool_of(urls[0], url)
    assert "expected the same model type" in str(caught.value)
    assert f"{urls[0]}: model type olmoe" in str(caught.value)
    assert f"{url}: model type qwen3_moe" in str(caught.value)


def test_a_dead_engine_is_given_up_after_the_attempts(engines, urls) -> None:
    with pool_of(*urls, attempts=3) as pool:

        async def dead(prompt, params):
            raise EngineUnavailableError("it is gone")

        for engine in engines:
            engine.generate_one = dead
        with pytest.raises(EngineUnavailableError):
            pool.generate([[1, 2]], SamplingParams())


def test_logprobs_and_commands(engines, urls) -> None:
    with pool_of(*urls) as pool:
        ids = list(range(1, 20))
        np.testing.assert_allclose(pool.prompt_logprobs(ids), engines[0].prompt_logprobs(ids), atol=1e-6)
        assert pool.topology == engines[0].topology
        assert pool.name.name.startswith("2 x ")
        assert responds(pool)
        pool.sleep()
        with pytest.raises(EngineError, match="is asleep"):
            pool.generate([[1]], SamplingParams())
        pool.wake()
        assert len(pool.generate([[1]], SamplingParams())) == 1


def test_servers_join_and_leave(engines, urls) -> None:
    """One that joins is sent the weights of the last update and then sampled from; one that leaves is not."""
    newer, listed, asked = tiny_model("olmoe", seed=3), [urls[0]], []
    for number, engine in enumerate(engines):
        sample = engine.generate_one

        async def counted(prompt, params, number=number, sample=sample):
            asked.append(number)
            return await sample(prompt, params)

        engine.generate_one = counted
    prompts = [[i + 1, 5] for i in range(8)]
    with pool_of(urls[0]) as pool:
        pool.follow(lambda: listed, lambda url: RolloutClient(url, token=TOKEN))
        pool.update_weights(checkpoint_tensors(newer), 7, weights_id="run-7")
        assert not pool.lacks_weights()
        listed.append(urls[1])
        assert pool.lacks_weights()
        pool.generate(prompts, SamplingParams(max_tokens=2))
        assert {*asked} == {0}
        assert list(pool.receivers_by_url("run-7")) == [urls[1]]
        pool.update_weights(checkpoint_tensors(newer), 7, weights_id="run-7")
        assert not pool.lacks_weights()
        assert [engine.weight_version for engine in engines] == [7, 7]
        assert pool.name.name.startswith("2 x ")
        asked.clear()
        pool.generate(prompts, SamplingParams(max_tokens=2))
        assert {*asked} == {0, 1}
        listed.remove(urls[0])
        assert not pool.lacks_weights()
        asked.clear()
        assert len(pool.generate(prompts, SamplingParams(max_tokens=2))) == len(prompts)
        assert asked == [1] * len(prompts)
        listed.clear()
        assert not pool.lacks_weights()
        assert pool.server_count() == 1


def test_servers_that_are_all_lost_are_waited_for(engines, urls, monkeypatch) -> None:
    """The one that takes their place is sent the next update; where nobody replaces them, nothing is waited for."""
    listed = iter([urls[:1]] * 3 + [urls[1:]] * 9)
    with pool_of(urls[0]) as pool:
        pool._members[0].engine.healthy = lambda: False
        assert not pool.wait_for_servers()
        pool.follow(lambda: next(listed), lambda url: RolloutClient(url, token=TOKEN))
        assert pool.wait_for_servers()
        pool.update_weights(checkpoint_tensors(tiny_model("olmoe", seed=3)), 7, weights_id="run-7")
        assert [engine.weight_version for engine in engines] == [0, 7]
        assert pool.generate([[1]], SamplingParams(max_tokens=1))[0][0].weight_version == 7
        monkeypatch.setattr("moe_replay.engines.pool.LISTED_S", 0.3)
        pool._members[0].engine.healthy = lambda: False
        assert not pool.wait_for_servers()  # it is listed, and nothing changes
