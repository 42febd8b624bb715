"""Servers that end while a transfer waits for them."""

from __future__ import annotations

import socket
from concurrent.futures import Future

import pytest

from moe_replay.rollout import pool_transfer


def test_a_server_on_whose_port_nobody_listens_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_transfer, "PAUSE_S", 0.0)
    done: Future[None] = Future()
    done.set_result(None)
    with socket.create_server(("127.0.0.1", 0)) as busy, socket.socket() as ended:
        ended.bind(("127.0.0.1", 0))  # taken, and without a listener
        urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in (busy, ended)]
        gone = pool_transfer._Gone({urls[0]: Future(), urls[1]: Future()})
        assert gone.servers() == {urls[1]: "it has ended"}, "a listener that is too busy to answer is alive"
        assert pool_transfer._Gone({urls[1]: done}).servers() == {}, "its update is over"
