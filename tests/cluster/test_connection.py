"""Clusters that cannot be joined: an error in place of a wait or a traceback."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from moe_replay.cluster.capacity import nodes_of
from moe_replay.cluster.connection import NoClusterError, join, join_or_start
from tests.train.runs import tiny_config

ray = pytest.importorskip("ray")


def joined(address: str | None, kind: str) -> AbstractContextManager[Any]:
    if kind == "status":
        return join(address)
    return join_or_start(tiny_config(Path("m"), Path("p"), Path("o"), cluster={"launcher": "ray", "address": address}))


@pytest.mark.parametrize("kind", ["run", "status"])
@pytest.mark.parametrize("given", ["setting", "variable"])
def test_a_dead_address_is_an_error_before_ray_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, port: int, kind: str, given: str
) -> None:
    address = f"127.0.0.1:{port}"
    monkeypatch.setenv("RAY_ADDRESS", address if given == "variable" else "")
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("waits for minutes"))
    with (
        pytest.raises(NoClusterError, match=f"Ray cluster.*(Connection refused.*{address}|{address}.*refused)"),
        joined(address if given == "setting" else None, kind),
    ):
        pass


@pytest.mark.parametrize("given", ["setting", "variable"])
def test_ray_s_own_name_for_a_new_cluster_joins_none(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """A look at the nodes of the cluster would start one, with fewer CPUs than the run starts it with."""
    monkeypatch.setenv("RAY_ADDRESS", "local" if given == "variable" else "")
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("starts a cluster"))
    address = "local" if given == "setting" else None
    cluster = {"launcher": "ray", "address": address, "ranks_per_node": 999}
    (machine,) = nodes_of(tiny_config(Path("m"), Path("p"), Path("o"), cluster=cluster))
    assert machine.total.cpus >= 999


def test_a_node_that_is_slow_to_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", time_out)
    with (
        pytest.raises(NoClusterError, match="local Ray cluster did not start: The current node timed"),
        joined(None, "run"),
    ):
        pass
