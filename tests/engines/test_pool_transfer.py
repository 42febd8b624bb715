"""Servers that end while a transfer waits for them."""

from __future__ import annotations

import socket
from concurrent.futures import Future

import pytest

from moe_replay.weights import transfer


def test_a_server_on_whose_port_nobody_listens_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PORT_CHECK_S", 0.0)
    done: Future[None] = Future()
    done.set_result(None)
    with socket.create_server(("127.0.0.1", 0)) as busy, socket.socket() as ended:
        ended.bind(("127.0.0.1", 0))  # taken, and without a listener
        urls = [f"http://127.0.0.1:{opened.getsockname()[1]}" for opened in (busy, ended)]
        ports = transfer._PortCheck({urls[0]: Future(), urls[1]: Future()})
        assert ports.closed() == {urls[1]: "it has ended"}, "a listener that is too busy to answer is alive"
        assert transfer._PortCheck({urls[1]: done}).closed() == {}, "its update is over"
