"""Ranks and workers of a transfer as threads: who reads whose memory, in many chunks, and what a failure ends."""

from __future__ import annotations

import errno
import gc
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import torch
from torch import Tensor

from moe_replay.distributed.network import address_seen_by, free_port
from moe_replay.errors import MoeReplayError
from moe_replay.weights.sender import DividedSender, HandOver, Rendezvous, WeightSender
from moe_replay.weights.source import Group, HandedGroup
from moe_replay.weights.staging import WeightReceiver
from moe_replay.weights.transfer import BroadcastGroup, Receivers, TransferError, TransferStore

CPU = torch.device("cpu")
CHUNK = 4096


def weights(rank: int) -> dict[str, Tensor]:
    """Tensors of several types and sizes, one larger than a chunk, one empty; every rank has values of its own."""
    sizes = {"a": (3, 5), "large": (50, 40), "b": (7,), "empty": (0, 4), "c": (30, 30), "d": (1,)}
    types = {"b": torch.bfloat16, "d": torch.int64}
    return {
        name: torch.arange(torch.Size(size).numel()).reshape(size).to(types.get(name, torch.float32)) + rank
        for name, size in sizes.items()
    }


def groups(rank: int, fails: bool = False) -> Iterator[Group]:
    for number, item in enumerate(weights(rank).items()):
        if fails and number == 4:
            raise MoeReplayError("no memory left")
        yield [item]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Give every thread a device of its own name."""
    own = threading.local()
    for module in ("sender", "staging"):
        monkeypatch.setattr(f"moe_replay.weights.{module}.device_id", lambda _: own.name)
    return own


def assisted(sender: WeightSender) -> int:
    """Do the part of a rank other than 0; return the bytes it has sent."""
    try:
        sender.assist()
    except MoeReplayError as failure:
        sender.fail(str(failure))
        raise
    sender.close()
    return sender.bytes_sent


class Scene:
    """Two ranks with a worker of two engines on the device of each."""

    def __init__(self, devices: threading.local, kind: str = "ipc", chunk: int = CHUNK) -> None:
        self.devices = devices
        self.store = TransferStore.listen("127.0.0.1", 60)
        ranks = (0, 1) if kind == "ipc" else (0,)
        self.rendezvous = Rendezvous(kind, "127.0.0.1", self.store.port, self.store.token, ranks, 2, chunk, 60)  # type: ignore[arg-type]
        self.engines = {"one": Receivers("cpu", ("gpu 0",)), "two": Receivers("cpu", ("gpu 1",))}
        self.messages: list[list[str]] = [[], []]
        self.ready = [threading.Semaphore(0), threading.Semaphore(0)]

    def first_rank(self) -> int:
        """Send the messages to both workers, as engines do."""
        self.devices.name = "gpu 0"
        sender = WeightSender(self.rendezvous, 0, CPU, groups(0), self.store)
        self.sender = weakref.ref(sender)
        transfer = sender.transfer(self.engines)
        self.settings = [transfer.for_engine(url) for url in self.engines]
        self.started.set()
        try:
            for message in transfer.messages_and_end():
                for list_, ready in zip(self.messages, self.ready, strict=True):
                    list_.append(message)
                    ready.release()
            return sender.bytes_sent
        finally:
            sender.close()
            for list_, ready in zip(self.messages, self.ready, strict=True):
                list_.append('{"end":-1}')
                ready.release()

    def second_rank(self, fails: bool) -> int:
        self.devices.name = "gpu 1"
        sender = WeightSender(self.rendezvous, 1, CPU, groups(1, fails))
        return assisted(sender)

    def worker(self, number: int) -> dict[str, Tensor]:
        self.devices.name = f"gpu {number}"
        self.started.wait()
        receiver = WeightReceiver(self.settings[number], 0, CPU)
        found: dict[str, Tensor] = {}
        while self.ready[number].acquire() and not (message := self.messages[number].pop(0)).startswith('{"end"'):
            found |= {name: tensor.clone() for name, tensor in receiver.receive(message)}
            receiver.acknowledge()
        receiver.close()
        return found

    def play(self, fails: bool = False) -> tuple[Future[int], Future[int] | None, list[Future[dict[str, Tensor]]]]:
        self.started = threading.Event()
        with ThreadPoolExecutor(4) as threads:
            first = threads.submit(self.first_rank)
            second = threads.submit(self.second_rank, fails) if self.rendezvous.kind == "ipc" else None
            workers = [threads.submit(self.worker, number) for number in range(2)]
        return first, second, workers


@pytest.mark.parametrize("chunk", [CHUNK, 2**20])
def test_every_worker_reads_the_memory_of_the_rank_on_its_device(devices: threading.local, chunk: int) -> None:
    first, second, workers = Scene(devices, chunk=chunk).play()
    assert second is not None
    for rank, worker in enumerate(workers):
        found, expected = worker.result(), weights(rank)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert all(found[name].dtype == tensor.dtype for name, tensor in expected.items())
    assert first.result() == second.result() == sum(tensor.nbytes for tensor in weights(0).values())


def test_what_a_sender_holds_is_freed_without_a_collection_of_garbage(devices: threading.local) -> None:
    """Its buffer, above all: collections are rare in a process that allocates little in Python."""
    scene = Scene(devices)
    gc.collect()
    gc.disable()
    try:
        scene.play()
        assert scene.sender() is None
    finally:
        gc.enable()


def test_a_broadcast_brings_the_first_rank_s_weights_to_all(devices: threading.local) -> None:
    first, _, workers = Scene(devices, "nccl").play()
    for worker in workers:
        assert all(torch.equal(worker.result()[name], tensor) for name, tensor in weights(0).items())
    assert first.result() > 0


def test_a_rank_that_fails_ends_the_transfer_for_all(devices: threading.local) -> None:
    first, second, workers = Scene(devices).play(fails=True)
    with pytest.raises(TransferError, match="no memory left"):
        first.result()
    assert second is not None
    with pytest.raises(MoeReplayError, match="no memory left"):
        second.result()
    assert all(len(worker.result()) < len(weights(0)) for worker in workers)


def test_who_has_no_token_neither_joins_nor_ends_a_transfer(devices: threading.local) -> None:
    """Strangers who know the names of all keys: nothing of theirs is answered or done, and nobody waits for them."""
    scene = Scene(devices, "nccl")
    address = ("127.0.0.1", scene.store.port)
    with pytest.raises(TransferError, match=r"cannot be reached"):
        TransferStore.connect(*address, "0" * len(scene.store.token), 60)
    with ExitStack() as strangers:
        silent = strangers.enter_context(socket.create_connection(address))
        calling = strangers.enter_context(socket.create_connection(address))
        calls = [["add", "ready", 2], ["set", "failure", '{"text": "stop", "worker": null}'], ["set", "group/0", "me"]]
        calling.sendall(b"".join(json.dumps(call).encode() + b"\n" for call in calls))
        with suppress(ConnectionResetError):
            assert calling.recv(1) == b""  # closed without an answer
        first, _, workers = scene.play()
        assert silent.fileno() >= 0
    for worker in workers:
        assert all(torch.equal(worker.result()[name], tensor) for name, tensor in weights(0).items())
    assert first.result() > 0


@pytest.mark.parametrize("listen", [TransferStore.listen, TransferStore.listen_by_torch])
def test_engines_that_are_reached_by_ipv6(listen: Callable[[str, float], TransferStore]) -> None:
    try:
        store = listen(address_seen_by("http://[::1]:8000"), 60)
        port = free_port("::1")
    except OSError as missing:
        if missing.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENETUNREACH):
            raise
        pytest.skip("this machine has no IPv6")
    other = store.connect_again()
    store.put("go", "go")
    assert store.get("go") == "go"
    assert port != store.port
    del other
    store.close()


def test_nobody_waits_for_a_worker_that_died_before_it_connected() -> None:
    store = TransferStore.listen("127.0.0.1", 3600)
    waiting = threading.Barrier(3)

    def join(rank: int) -> None:
        own = TransferStore.connect("127.0.0.1", store.port, store.token, 3600)
        waiting.wait()
        BroadcastGroup(own, rank, 3, "cpu")  # of which the third never comes

    with ThreadPoolExecutor(2) as threads:
        joining = [threads.submit(join, rank) for rank in range(2)]
        waiting.wait()
        store.fail("worker 2 has died")
        for one in joining:
            with pytest.raises(TransferError, match="worker 2 has died"):
                one.result()
    while any(thread.name == "broadcast group" for thread in threading.enumerate()):  # they would crash the end
        time.sleep(0.01)


def test_a_connection_that_a_failure_has_ended_names_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the thread that connects has ended before this one looks for a failure."""
    store = TransferStore.listen("127.0.0.1", 3600)
    own = TransferStore.connect("127.0.0.1", store.port, store.token, 3600)
    store.fail("worker 1 has died")

    def wait(done: Callable[[], bool], doing: str, check: object) -> None:
        while not done():
            time.sleep(0.01)

    monkeypatch.setattr(own, "wait", wait)
    with pytest.raises(TransferError, match="worker 1 has died"):
        BroadcastGroup(own, 0, 2, "cpu")


class DividedScene(Scene):
    """Two ranks that have an expert each, and one worker on the first device, which opens both."""

    def __init__(self, devices: threading.local, kind: str, fails: bool) -> None:
        super().__init__(devices, kind)
        self.rendezvous = self.rendezvous._replace(ranks=(0, 1), workers=1)
        self.engines = {"one": self.engines["one"]}
        opens = {"gpu 0": ["gpu 0", "gpu 1"]} if kind == "ipc" else {}
        self.hand_over = HandOver.between(["gpu 0", "gpu 1"], opens, (0,))
        self.fails = fails

    def sender(self, rank: int) -> DividedSender:
        self.devices.name = f"gpu {rank}"
        store = self.store if rank == 0 else None
        return DividedSender(self.rendezvous, rank, CPU, self.handed(rank), store, hand_over=self.hand_over)

    def handed(self, rank: int) -> Iterator[HandedGroup]:
        """What both have, the expert of each, and a tensor of which each has two rows."""
        for owner in (None, 0, 1):
            if owner == 1 and self.fails and rank == 1:
                raise MoeReplayError("no memory left")
            fused = [("fused", torch.arange(8.0).reshape(4, 2)[2 * (owner or 0) :][:2])]
            own = weights(0).items() if owner is None else [*fused, (f"expert {owner}", torch.full((40, 50), owner))]
            tensors = list(own) if rank == (owner or 0) else []
            yield HandedGroup(owner, tensors, {} if owner is None else {"fused": (2 * owner, 4)})

    def first_rank(self) -> int:
        sender = self.sender(0)
        transfer = sender.transfer(self.engines)
        self.settings = [transfer.for_engine("one")]
        self.started.set()
        try:
            for message in transfer.messages_and_end():
                self.messages[0].append(message)
                self.ready[0].release()
            return sender.bytes_sent
        finally:
            sender.close()
            self.messages[0].append('{"end":-1}')
            self.ready[0].release()

    def second_rank(self, fails: bool = False) -> int:
        sender = self.sender(1)
        return assisted(sender)

    def run(self) -> tuple[Future[int], Future[int], Future[dict[str, Tensor]]]:
        self.started = threading.Event()
        with ThreadPoolExecutor(3) as threads:
            return threads.submit(self.first_rank), threads.submit(self.second_rank), threads.submit(self.worker, 0)


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_a_worker_reads_from_every_owner_and_puts_rows_together(devices: threading.local, kind: str) -> None:
    first, second, worker = DividedScene(devices, kind, fails=False).run()
    expected = weights(0) | {"fused": torch.arange(8.0).reshape(4, 2)}
    expected |= {f"expert {owner}": torch.full((40, 50), owner) for owner in (0, 1)}
    found = worker.result()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert first.result() == sum(tensor.nbytes for tensor in expected.values())
    assert second.result() == expected["expert 1"].nbytes + expected["fused"].nbytes // 2


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_an_owner_that_fails_in_its_turn_ends_the_transfer_for_all(devices: threading.local, kind: str) -> None:
    first, second, worker = DividedScene(devices, kind, fails=True).run()
    with pytest.raises(TransferError, match="no memory left"):
        first.result()
    with pytest.raises(MoeReplayError, match="no memory left"):
        second.result()
    if (ended := worker.exception()) is None:
        assert "fused" not in worker.result(), "half of its rows have come"
    else:  # it was waiting for a chunk, or opening a buffer whose owner had ended
        assert isinstance(ended, TransferError | RuntimeError)
        assert "no memory left" in str(ended) or "unable to open file" in str(ended)
