"""Which kind of weight sync is chosen."""

from __future__ import annotations

import pytest

from moe_replay.errors import EngineError
from moe_replay.rollout.transfer import Receivers
from moe_replay.train.weight_sync import choose_kind

TRAINER = {"gpu 0", "gpu 1"}
SHARED = {"": Receivers("cuda", ("gpu 0", "gpu 1"))}
APART = {"http://a": Receivers("cuda", ("gpu 2",)), "http://b": Receivers("cuda", ("gpu 3",))}
MIXED = {"http://a": Receivers("cuda", ("gpu 1",)), "http://b": Receivers("cuda", ("gpu 3",))}
ON_CPU = {"": Receivers("cpu", ("machine",))}


@pytest.mark.parametrize(
    ("targets", "kind"), [(SHARED, "ipc"), (APART, "nccl"), (MIXED, "http"), (ON_CPU, "http"), (None, "http")]
)
def test_auto_goes_by_where_the_workers_are(targets: dict[str, Receivers] | None, kind: str) -> None:
    choice = choose_kind("auto", "cuda", TRAINER, targets)
    assert choice.kind == kind
    assert choice.reason


def test_a_trainer_on_a_cpu_sends_in_requests() -> None:
    assert choose_kind("auto", "cpu", {"machine"}, ON_CPU).kind == "http"


@pytest.mark.parametrize("wanted", ["http", "ipc", "nccl"])
def test_what_is_configured_is_used_on_cpus(wanted: str) -> None:
    assert choose_kind(wanted, "cpu", {"machine"}, ON_CPU) == (wanted, "as configured")


@pytest.mark.parametrize(
    ("wanted", "targets", "text"),
    [
        ("ipc", APART, "no rank of the trainer uses"),
        ("ipc", MIXED, "no rank of the trainer uses"),
        ("nccl", SHARED, "NCCL does not allow"),
        ("nccl", MIXED, "NCCL does not allow"),
        ("nccl", ON_CPU, "one type of device"),
        ("ipc", None, "in requests only"),
    ],
)
def test_what_cannot_be_is_refused(wanted: str, targets: dict[str, Receivers] | None, text: str) -> None:
    with pytest.raises(EngineError, match=text):
        choose_kind(wanted, "cuda", TRAINER, targets)
