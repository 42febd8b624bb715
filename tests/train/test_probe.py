"""The check that sequences of one micro-batch do not see each other, on models that keep them apart and on one not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import moe_replay as mr
from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.learn.probe import ProbeSequence
from moe_replay.train.setup import launch
from tests.replay.adapters.families import tiny_model
from tests.train.runs import tiny_config

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[None]:
    with launch.process_group(CPU):
        yield


def backend_of(family: str, folder: Path, packed: bool) -> FsdpBackend:
    tiny_model(family).save_pretrained(folder)
    config = tiny_config(folder, folder, folder / "run", batch={"packed": packed})
    return FsdpBackend(config, str(folder), CPU)


@pytest.mark.parametrize(("family", "packed"), [("qwen3_moe", True), ("qwen3_moe", False), ("qwen3_next", False)])
@pytest.mark.usefixtures("group")
def test_sequences_stay_apart(tmp_path: Path, family: str, packed: bool) -> None:
    backend = backend_of(family, tmp_path, packed)
    probe = ProbeSequence.broadcast(range(3, 40), backend)
    probe.check_packing(backend, tolerance=1e-4)
    found = probe.score(backend, tiny_config(tmp_path, tmp_path, tmp_path).rollout)
    assert found is not None
    assert found.logprobs.shape == (36,)


@pytest.mark.usefixtures("group")
def test_a_state_that_flows_into_the_next_sequence_is_found(tmp_path: Path) -> None:
    """Linear attention carries a state from token to token, and knows nothing of where a packed sequence begins."""
    backend = backend_of("qwen3_next", tmp_path, packed=True)
    with pytest.raises(mr.AlignmentError, match=r"packed sequences see each other.*batch\.packed = false"):
        ProbeSequence.broadcast(range(3, 40), backend).check_packing(backend, tolerance=1e-4)
