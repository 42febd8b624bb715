"""The control group and failures: long work of one rank ends nobody, and a rank that fails frees the others."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from moe_replay.distributed import network, rank_watch
from moe_replay.distributed.network import TOKEN_BYTES, RankServer
from moe_replay.distributed.rank_watch import Failure, FailureChannel, RankLostError
from moe_replay.distributed.ranks import all_gather_json, any_rank, from_rank_0, raise_on_all_ranks, rank
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.setup import launch
from tests.distributed.harness import run_ranks
from tests.faults.forked import fork_python
from tests.faults.processes import LIMIT_S
from tests.train.runs import tiny_config

pytest.importorskip("transformers")

SHORT_S = 2.0


def _set_timeout_of_tensors(seconds: float) -> None:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)


def sample_slowly(folder: str, prompts: str, output: str) -> int:
    """Tokens of a rollout that takes longer than a collective of the tensors' backend may."""
    from moe_replay.engines.transformers import TransformersEngine
    from moe_replay.train.run import Job

    class SlowEngine(TransformersEngine):
        slow = False

        def generate(self, *arguments: Any) -> Any:
            time.sleep(2 * SHORT_S if self.slow else 0)
            return super().generate(*arguments)

    engine = SlowEngine.from_pretrained(folder) if rank() == 0 else None
    with Job.open(tiny_config(Path(folder), Path(prompts), Path(output), steps=1), engine) as job:
        if engine is not None:
            engine.slow = True
        _set_timeout_of_tensors(SHORT_S)
        batch = job.rollout()
        _set_timeout_of_tensors(LIMIT_S)
        return batch.num_tokens


@pytest.mark.whole_runs
def test_a_rollout_may_take_longer_than_collectives_of_tensors(demo_files: Any, tmp_path: Path) -> None:
    first, second = run_ranks(2, sample_slowly, str(demo_files.model), str(demo_files.train), str(tmp_path / "run"))
    assert first == second > 0


def exchange() -> list[Any]:
    """What each rank gets to know in an existing process group, from which messages keep apart."""
    with launch.process_group(torch.device("cpu")) as watch, watch:
        _set_timeout_of_tensors(SHORT_S)
        with raise_on_all_ranks("work"):
            if rank() == 2:
                time.sleep(2 * SHORT_S)
        told = [all_gather_json(f"rank {rank()}"), from_rank_0(lambda: "é", "telling"), any_rank(rank() == 1)]
        try:
            with raise_on_all_ranks("other work"):
                if rank() == 1:
                    raise OSError("no disk")
        except (OSError, ValueError) as error:
            told.append(str(error))
        _set_timeout_of_tensors(LIMIT_S)
        return told


def test_messages_have_a_group_of_their_own() -> None:
    every = run_ranks(3, exchange)
    common = [["rank 0", "rank 1", "rank 2"], "é", True]
    other = "other work failed on rank 1: OSError: no disk"
    assert every == [[*common, other], [*common, "no disk"], [*common, other]]


def end_of_engines() -> list[str]:
    """What becomes of this rank's engines if those of the next machine do not start."""
    from moe_replay.engines.server import engine_processes
    from moe_replay.errors import EngineUnavailableError
    from moe_replay.train.setup import engines

    class Processes:
        ports = (1,)

        def __init__(self, *_: Any, **__: Any) -> None:
            if rank() == 1:
                raise EngineUnavailableError("engine 0 of this machine did not start")
            told.append("started")

        def close(self) -> None:
            told.append("ended")

    told: list[str] = []
    config = TrainConfig(rollout={"engines_per_node": 1})
    os.environ["LOCAL_RANK"] = "0"
    with (
        patch.multiple(engine_processes, EngineProcesses=Processes),
        patch.multiple(engines, start_request=print, longest_sequence=print),
        launch.process_group(torch.device("cpu")) as watch,
        watch,
    ):
        try:
            with engines.engines_of_all_nodes(config, "model"):
                pass
        except ValueError as error:
            told.append(str(error))
    return told


def test_engines_end_if_those_of_another_machine_do_not_start() -> None:
    problem = "engine 0 of this machine did not start"
    other = f"starting the rollout engines failed on rank 1: EngineUnavailableError: {problem}"
    assert run_ranks(2, end_of_engines) == [["started", "ended", other], [problem]]


# ---- failures --------------------------------------------------------------------------------------------------------

RANK = """
import sys, threading
import torch, torch.distributed as dist
from moe_replay.distributed import ranks
from moe_replay.distributed.ranks import OtherRankError, raise_on_all_ranks, rank
from moe_replay.train.setup import launch

ranks.FAILED_PATIENCE = ranks.timedelta(seconds=1)
try:
    with launch.process_group(torch.device("cpu")) as watch, watch:
        if rank() == 1:
            if sys.argv[1] == "inside":
                with raise_on_all_ranks("work"):
                    raise ZeroDivisionError("no tokens")
            raise ZeroDivisionError("no tokens")
        if sys.argv[1] == "control" and rank() == 0:
            with raise_on_all_ranks("work"):
                pass
        if sys.argv[1] == "inside":
            with raise_on_all_ranks("work"):
                dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
except OtherRankError as error:
    print(f"{error.known_on_all_ranks}: {error}", flush=True)
except ZeroDivisionError:
    print("own", flush=True)
"""


@pytest.mark.parametrize("where", ["tensors", "control", "inside"])
def test_a_rank_that_raises_frees_the_others_with_its_message(where: str, port: int) -> None:
    """They wait for it in collectives of tensors, of messages, or inside a block that all ranks should leave."""
    told = _run_ranks(3, RANK, where, port=port)
    assert told[1] == "own"
    assert [told[0], told[2]] == ["True: rank 1: ZeroDivisionError: no tokens"] * 2


TRAIN = """
import sys
from pathlib import Path
from moe_replay.errors import MoeReplayError
from moe_replay.train.loop import train
from tests.train.runs import tiny_config

model, prompts, output = map(Path, sys.argv[1:])
loss = {"loss": "tests.distributed.test_control:failing_loss"}
try:
    train(tiny_config(model, prompts, output, algorithm=loss, steps=1))
except (MoeReplayError, ZeroDivisionError) as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


def failing_loss(inputs: Any, settings: Any) -> Any:
    """A loss that fails on rank 1, in the first update."""
    from moe_replay.train.learn.losses import clipped_surrogate

    if rank() == 1 and len(inputs.logprobs) > 8:  # fewer when its metrics are asked for
        raise ZeroDivisionError("no tokens")
    return clipped_surrogate(inputs, settings)


def test_a_rank_that_raises_in_an_update_frees_the_others(demo_files: Any, tmp_path: Path, port: int) -> None:
    files = (str(demo_files.model), str(demo_files.train), str(tmp_path / "run"))
    told = _run_ranks(2, TRAIN, *files, port=port)
    failed = "LossError: policy loss 'tests.distributed.test_control:failing_loss' raised ZeroDivisionError: no tokens"
    assert f"OtherRankError: rank 1: {failed}" in told[0]
    assert failed in told[1]
    assert "OtherRankError" not in told[1]


def _run_ranks(size: int, code: str, *arguments: str, port: int) -> list[str]:
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [fork_python(code, *arguments, environment=place | {"RANK": str(number)}) for number in range(size)]
    try:
        return [each.communicate(timeout=LIMIT_S)[0].strip() for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.stdout.close()


# ---- the channel -----------------------------------------------------------------------------------------------------


def _server() -> RankServer:
    listener = socket.create_server(("127.0.0.1", 0))
    return RankServer("127.0.0.1", listener.getsockname()[1], os.urandom(TOKEN_BYTES), listener)


def _channels(count: int, silence_s: float = 600.0) -> list[FailureChannel]:
    channels, server = [FailureChannel(number, silence_s) for number in range(count)], _server()
    opening = threading.Thread(target=channels[0].open, args=(server, count))
    opening.start()
    stranger = socket.create_connection((server.host, server.port))
    stranger.sendall(bytes(TOKEN_BYTES))
    for channel in channels[1:]:
        channel.open(server._replace(listener=None), count)
    opening.join()
    assert stranger.recv(1) == b""  # without the token nobody gets in
    stranger.close()
    return channels


def _reset(server: RankServer) -> None:
    """Connect as a port scanner does."""
    with socket.create_connection((server.host, server.port)) as scanner:
        scanner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_strangers_do_not_keep_ranks_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scans, connections that say nothing, that say too little, and more of them than are kept open."""
    monkeypatch.setattr(network, "HANDSHAKE_S", LIMIT_S)
    channels, server = [FailureChannel(number, 600.0) for number in range(2)], _server()
    with ThreadPoolExecutor(1) as thread, ExitStack() as strangers:
        opening = thread.submit(channels[0].open, server, 2)
        for number in range(network.MAX_STRANGERS + 10):
            silent = strangers.enter_context(socket.create_connection((server.host, server.port)))
            silent.sendall(server.token[: number % 2])
            _reset(server)
        channels[1].open(server._replace(listener=None), 2)
        opening.result(LIMIT_S)
        channels[1].publish("late")
        assert _known(channels[0]) == Failure(1, "late")
    for channel in channels:
        channel.close()


def test_ranks_that_cannot_connect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "CONNECT_S", 0.2)
    server = _server()
    channel = FailureChannel(0, 600.0)
    with pytest.raises(RankLostError, match=r"rank 0 has no connection to ranks \[1, 2\].*firewall"):
        channel.open(server, 3)
    channel.close()
    other = FailureChannel(2, 600.0)
    with pytest.raises(RankLostError, match=rf"rank 2 has no connection to rank 0.*:{server.port}.*firewall"):
        other.open(server._replace(listener=None), 3)  # nobody listens there any more
    other.close()


def test_a_connection_without_the_token_is_closed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "HANDSHAKE_S", 0.1)
    server = _server()
    assert server.listener is not None
    accepting = threading.Thread(target=lambda: list(network.admitted(server.listener, server.token)))
    accepting.start()
    with socket.create_connection((server.host, server.port), timeout=LIMIT_S) as silent:
        assert silent.recv(1) == b""
    server.listener.shutdown(socket.SHUT_RDWR)
    server.listener.close()
    accepting.join(LIMIT_S)
    assert not accepting.is_alive()


def _known(channel: FailureChannel) -> Failure | None:
    assert select.select([channel], [], [], LIMIT_S)[0]
    return channel.failure


@pytest.mark.parametrize("failing", [0, 2])
def test_what_one_rank_says_reaches_all_others(failing: int) -> None:
    channels = _channels(4)
    channels[failing].publish("LossError: wrong", status=2)
    others = [channel for channel in channels if channel.rank != failing]
    assert [_known(channel) for channel in others] == [Failure(failing, "LossError: wrong", 2)] * 3
    for channel in channels:
        channel.close()


def stop(channel: FailureChannel) -> None:
    """Do as the kernel does with a process that is killed."""
    assert channel._thread is not None
    channel._closing.send(b".")
    channel._thread.join()
    for connection in channel._peers:
        connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_ends_without_a_word_is_named(killed: int) -> None:
    channels = _channels(3)
    stop(channels[killed])
    others = [channel for channel in channels if channel.rank != killed]
    assert [_known(channel) for channel in others] == [Failure(killed, None)] * 2
    for channel in channels:
        channel.close()


def test_ranks_that_are_done_are_no_failures() -> None:
    first, second, third = _channels(3)
    second.close()
    third.publish("late")
    assert _known(first) == Failure(2, "late")
    for channel in (first, third):
        channel.close()


def test_a_rank_that_hangs_is_named() -> None:
    channel, server = FailureChannel(0, silence_s=0.5), _server()
    silent = socket.create_connection((server.host, server.port))
    silent.sendall(server.token + (1).to_bytes(4, "little"))
    channel.open(server, 2)
    assert _known(channel) == Failure(1, None)
    channel.close()
    silent.close()
