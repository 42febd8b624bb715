"""Sharded policies through every kind of weight sync, to two and to four servers: the bytes that `http` brings."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_replay.rollout.weights.transfer import Receivers, Transfer
from moe_replay.rollout.weights.types import Weights
from tests.combinations import with_whole_runs
from tests.distributed import harness, weight_transfers
from tests.distributed.megatron_models import PRELOADED
from tests.distributed.test_weight_sources import BF16, PP_EP, as_sent
from tests.megatron.weights.models import assert_same_bytes, save_checkpoint, tiny
from tests.rollout.serving import serving
from tests.rollout.test_weight_chunks import TOKEN, Receiver

pytest.importorskip("megatron.core")
pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("pydantic")
harness.PRELOADED.extend(PRELOADED)

own_device = threading.local()


class Worker(Receiver):
    """An engine with one worker, on the device of a rank; it keeps the weights of each update."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.receivers = Receivers("cpu", (f"gpu {rank}",))
        self.of_version: dict[int, dict[str, Tensor]] = {}
        self.transfers: list[str] = []

    def update_weights(self, weights: Weights, version: int, probe: Any = None, weights_id: str = "") -> None:
        from moe_replay.rollout.weights.receiver import received_tensors

        own_device.name = self.receivers.ids[0]
        if isinstance(weights, Transfer):
            self.transfers.append(weights.for_engine("").kind)
            weights = received_tensors(weights, torch.device("cpu"))
        super().update_weights(weights, version, probe, weights_id)
        self.of_version[version] = self.weights


def assert_shares(shares: list[dict[str, Any]], wanted: dict[str, Tensor]) -> None:
    """Every layer is on one rank alone, and all of them together are the weights."""
    assert all(one["names"] == shares[0]["names"] for one in shares), "all of the model, on every rank"
    assert all(list(one["tensors"]) == one["held"] for one in shares)
    assert all(0 < len(one["held"]) < 0.7 * len(wanted) for one in shares)
    assert sum(len(one["held"]) for one in shares) == len(wanted)
    assert_same_bytes({name: tensor for one in shares for name, tensor in one["tensors"].items()}, wanted)
    assert shares[0]["held"][-1] == shares[0]["names"][-1], "rank 0 reads the last layer, which all others precede"


@pytest.mark.parametrize(
    ("kind", "settings"),
    with_whole_runs([("fsdp", {}), ("megatron", PP_EP)], [("fsdp", {})]),
    ids=["fsdp4", "pp2-ep2"],
)
def test_servers_get_the_bytes_that_http_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any]
) -> None:
    from moe_replay.rollout.server.app import build_app

    monkeypatch.setattr("moe_replay.rollout.weights.receiver.device_id", lambda _: own_device.name)
    save_checkpoint(tiny("deepseek_v3"), tmp_path)
    wanted = as_sent(tmp_path, kind)
    total = sum(tensor.nbytes for tensor in wanted.values())
    assert total > 2 * weight_transfers.CHUNK_BYTES
    workers = [Worker(rank) for rank in (1, 3, 0, 2)]
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(build_app(worker, TOKEN))) for worker in workers]  # type: ignore[arg-type]
        updates = [(how, urls[:count]) for count in (2, 4) for how in ("http", "ipc", "nccl")]
        ranks = harness.run_ranks(4, weight_transfers.send, str(tmp_path), kind, settings | BF16, updates, TOKEN)
    shares = [found.pop() for found in ranks]
    assert_shares(shares, wanted)
    assert [one["kind"] for one in ranks[0]] == [how for how, _ in updates]
    assert [one["nbytes"] for one in ranks[0]] == [total] * 6
    by_ipc = [(ranks[rank][1]["nbytes"], ranks[rank][4]["nbytes"]) for rank in range(4)]
    assert by_ipc == [(total, total), (total, total), (0, total), (total, total)], "rank 2 has no worker at first"
    assert all(ranks[rank][2]["nbytes"] == 0 for rank in (1, 2, 3)), "one rank broadcasts, and no other holds tensors"
    for number, worker in enumerate(workers):
        assert worker.transfers == (["ipc", "nccl"] * 2 if number < 2 else ["ipc", "nccl"])
        assert worker.of_version.keys() == ({1, 2, 3, 4, 5, 6} if number < 2 else {4, 5, 6})
        for tensors in worker.of_version.values():
            assert_same_bytes(tensors, wanted)
