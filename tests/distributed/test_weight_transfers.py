"""Sharded policies through every kind of weight sync, to two and to four servers: the bytes that `http` brings."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_replay.weights.source import Weights
from moe_replay.weights.staging import received_tensors
from moe_replay.weights.transfer import Receivers, Transfer
from tests.combinations import with_thorough, with_whole_runs
from tests.distributed import harness, weight_transfers
from tests.distributed.megatron_models import PRELOADED
from tests.distributed.test_weight_sources import BF16, PP_EP, as_sent
from tests.engines.serving import serving
from tests.engines.test_weight_chunks import TOKEN, Receiver
from tests.megatron.weights.models import assert_same_bytes, save_checkpoint, tiny
from tests.support.weight_sources import layer_prefix

pytest.importorskip("megatron.core")
pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("pydantic")
harness.PRELOADED.extend(PRELOADED)

own_device = threading.local()


class Worker(Receiver):
    """An engine with one worker, on the device of a rank; it keeps the weights of each update."""

    receivers: Receivers

    def __init__(self, rank: int, opens: Sequence[int] = ()) -> None:
        super().__init__()
        self.receivers = Receivers("cpu", (f"gpu {rank}",), tuple(f"gpu {other}" for other in opens))
        self.of_version: dict[int, dict[str, Tensor]] = {}
        self.transfers: list[str] = []

    def update_weights(self, weights: Weights, version: int, probe: Any = None, weights_id: str = "") -> None:
        super().update_weights(weights, version, probe, weights_id)
        self.of_version[version] = self.weights

    def receive_weights(self, transfer: Transfer, version: int, probe: Any = None, weights_id: str = "") -> None:
        own_device.name = self.receivers.ids[0]
        self.transfers.append(transfer.for_engine("").kind)
        self.update_weights(received_tensors(transfer, torch.device("cpu")), version, probe, weights_id)


@pytest.mark.parametrize(
    ("kind", "settings"),
    with_whole_runs([("fsdp", {}), ("megatron", PP_EP)], [("fsdp", {})]),
    ids=["fsdp4", "pp2-ep2"],
)
def test_servers_get_the_bytes_that_http_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any]
) -> None:
    from moe_replay.engines.server.app import build_app

    monkeypatch.setattr("moe_replay.weights.staging.device_id", lambda _: own_device.name)
    save_checkpoint(tiny("deepseek_v3"), tmp_path)
    wanted = as_sent(tmp_path, kind)
    total = sum(tensor.nbytes for tensor in wanted.values())
    assert total > 2 * weight_transfers.CHUNK_BYTES
    workers = [Worker(rank) for rank in (1, 3, 0, 2)]
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(build_app(worker, TOKEN))) for worker in workers]  # type: ignore[arg-type]
        updates = [(how, urls[:count]) for count in (2, 4) for how in ("http", "ipc", "nccl")]
        ranks = harness.run_ranks(4, weight_transfers.send, str(tmp_path), kind, settings | BF16, updates, TOKEN)
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


EP2 = {"expert_parallel": 2}
EVERY: list[int] = [0, 1, 2, 3]
NONE: list[int] = []


@pytest.mark.parametrize(
    ("variant", "opens"),
    with_thorough(
        [("gpt_oss", EVERY), ("deepseek_v3", [2]), ("deepseek_v3", EVERY), ("deepseek_v3", NONE), ("gpt_oss", [2])],
        [("deepseek_v3", EVERY), ("deepseek_v3", NONE), ("gpt_oss", [2])],
    ),
    ids=str,
)
def test_each_rank_hands_over_its_own_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, opens: list[int]
) -> None:
    """Four ranks have a quarter of the experts each; of the others' they hold a chunk of a broadcast at most.

    A worker that cannot open the memory of other devices reads a copy on its own, of one rank's experts at a time.
    """
    from moe_replay.engines.server.app import build_app

    monkeypatch.setattr("moe_replay.weights.staging.device_id", lambda _: own_device.name)
    save_checkpoint(tiny(variant), tmp_path)
    wanted = as_sent(tmp_path, "fsdp")
    total = sum(tensor.nbytes for tensor in wanted.values())
    workers = [Worker(rank, opens) for rank in (1, 2)]
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(build_app(worker, TOKEN))) for worker in workers]  # type: ignore[arg-type]
        updates = [(how, urls) for how in ("ipc", "nccl", "http")]
        ranks = harness.run_ranks(4, weight_transfers.send, str(tmp_path), "fsdp", EP2 | BF16, updates, TOKEN)
    for worker in workers:
        assert worker.transfers == ["ipc", "nccl"]
        for tensors in worker.of_version.values():
            assert_same_bytes(tensors, wanted)
    assert [one["nbytes"] for one in ranks[0]] == [total] * 3
    assert ["each rank hands over its own experts" in one["reason"] for one in ranks[0]] == [True, True, False]
    of_experts = sum(tensor.nbytes for name, tensor in wanted.items() if is_expert(name))
    copied = [owner for owner in range(4) if owner not in opens]
    for rank, (ipc, nccl, _) in enumerate(ranks):
        has_worker = rank in (1, 2)
        assert nccl["of_others"] == 0
        assert ipc["of_others"] == of_experts // 4 * (len({*copied} - {rank}) if has_worker else 0)
        if rank != 0:  # which reports what all have sent
            assert nccl["nbytes"] == of_experts // 4
            assert ipc["nbytes"] == of_experts // 4 + ipc["of_others"] + (total - of_experts if has_worker else 0)
    dense, experts = largest_layer(wanted, experts=False), largest_layer(wanted, experts=True)
    bound = 2 * max(dense, experts // 4) + experts // 4  # a group, its chunk, and what a tensor of it is made of
    assert variant != "gpt_oss" or bound < experts
    for rank in ranks:
        assert all(one["peak"] <= bound for one in rank[:2]), "a rank holds experts of others"
        assert rank is not ranks[0] or rank[2]["peak"] > bound, "http sends tensors through rank 0"


def is_expert(name: str) -> bool:
    return ".experts." in name


def largest_layer(tensors: dict[str, Tensor], *, experts: bool) -> int:
    """The bytes of the experts of the largest layer, or of everything else in one."""
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        sizes[layer_prefix(name)] += tensor.nbytes if is_expert(name) == experts else 0
    return max(sizes.values())
