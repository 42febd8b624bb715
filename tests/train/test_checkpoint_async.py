"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import copy
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from moe_replay.train.checkpoint import checkpoint
from moe_replay.train.checkpoint.checkpoint import (
    CheckpointError,
    Checkpoints,
    CheckpointWriteError,
    TrainerState,
    WriterLostError,
)
from moe_replay.utils.files import Write
from tests.distributed.harness import run_ranks
from tests.train.policy import SmallPolicy
from tests.train.test_checkpoint import in_child

LIMIT_S = 120.0


def state_at(step: int) -> TrainerState:
    return TrainerState(step=step, version=step, data={"position": step})


class SlowPolicy(SmallPolicy):
    """Writes when it may, in a folder of its rank, and fails if it shall."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.may_write = threading.Event()
        self.fails: bool | Exception = False

    def stage(self) -> Write:
        model, optimizer, fails = copy.deepcopy(self.model), copy.deepcopy(self.optimizer.state_dict()), self.fails

        def write(folder: Path) -> list[Path]:
            own = self._own(folder)
            own.mkdir(exist_ok=True)
            torch.save(model.state_dict(), own / "model.pt")
            torch.save(optimizer, own / "optimizer.pt")
            assert self.may_write.wait(LIMIT_S)
            if fails:
                raise fails if isinstance(fails, Exception) else OSError("nothing left")
            return sorted(path for path in own.iterdir() if path.is_file())

        return write

    def _own(self, folder: Path) -> Path:
        return folder / f"rank-{dist.get_rank():05d}" if dist.is_initialized() else folder

    def load(self, folder: Path) -> None:
        super().load(self._own(folder))


def saved_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    policy, checkpoints = SlowPolicy(), Checkpoints(tmp_path, asynchronous=True)
    policy.train(1)
    checkpoints.save(policy, state_at(1))
    content, drawn = policy.everything(), torch.get_rng_state()
    policy.train(2)
    assert saved_steps(tmp_path) == [], "valid before it is written"
    policy.may_write.set()
    checkpoints.wait()
    assert saved_steps(tmp_path) == ["step-00000001"]
    checkpoints.save(policy, state_at(1))  # there is no such step any more, but nothing is written twice
    assert checkpoints.metrics().keys() == {"time/save"}
    assert checkpoints.metrics() == {}

    resumed = SlowPolicy(seed=3)
    assert Checkpoints(tmp_path).restore(resumed) == state_at(1)
    assert resumed.is_like(content)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("then", ["save", "wait"])
def test_what_the_writer_raises_is_raised_by_the_next_call(tmp_path: Path, then: str) -> None:
    policy, checkpoints = SlowPolicy(), Checkpoints(tmp_path, asynchronous=True)
    policy.may_write.set()
    checkpoints.save(policy, state_at(1))
    checkpoints.wait()
    policy.fails = True
    checkpoints.save(policy, state_at(2))
    with pytest.raises(CheckpointWriteError, match=r"step 2 could not .*OSError: nothing left.*step 1 is kept"):
        _ = checkpoints.wait() if then == "wait" else checkpoints.save(policy, state_at(3))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    policy.fails = False
    checkpoints.save(policy, state_at(2))  # the run may go on
    checkpoints.close()
    assert saved_steps(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_full_disk_is_one_line_whatever_a_library_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that ends for another reason, such as metrics that cannot be written either, says which step is kept."""
    policy, checkpoints = SlowPolicy(), Checkpoints(tmp_path, asynchronous=True)
    policy.may_write.set()
    checkpoints.save(policy, state_at(1))
    checkpoints.wait()
    policy.fails = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    checkpoints.save(policy, state_at(2))
    assert checkpoints.settle()
    checkpoints.close()
    assert "the last checkpoint could not be written: Error while serializing" in caplog.text
    assert "(os error 28); the checkpoint of step 1 is kept" in caplog.text
    assert "Traceback" not in caplog.text


def test_nobody_waits_for_a_writer_that_could_not_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    checkpoints = Checkpoints(tmp_path, asynchronous=True)
    monkeypatch.setattr(checkpoint, "CLOSE_S", 0)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start"):
        patched.setattr(threading.Thread, "start", start)
        checkpoints.save(SlowPolicy(), state_at(1))
    assert checkpoints.settle()


def test_a_run_killed_while_a_checkpoint_is_written_has_the_one_before(tmp_path: Path) -> None:
    policy = SlowPolicy()
    policy.train(1)
    policy.may_write.set()
    Checkpoints(tmp_path).save(policy, state_at(1))
    content = policy.everything()

    def killed() -> None:
        torch.set_num_threads(1)
        other, checkpoints = SlowPolicy(), Checkpoints(tmp_path, asynchronous=True)
        checkpoints.restore(other)
        checkpoints.save(other, state_at(2))  # which never may
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(killed) == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob(".step-*")] == [".step-00000002.partial"]
    resumed = SlowPolicy(seed=2)
    assert Checkpoints(tmp_path).restore(resumed) == state_at(1)
    assert resumed.is_like(content)
    assert list(tmp_path.glob(".*")) == []


# ---- several ranks ---------------------------------------------------------------------------------------------------


def write_on_ranks(folder: str) -> dict[str, Any]:
    rank, flushed, fsync = dist.get_rank(), set[str](), os.fsync

    def noting_fsync(descriptor: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    os.fsync = noting_fsync
    policy, checkpoints = SlowPolicy(seed=rank), Checkpoints(Path(folder), asynchronous=True)
    checkpoints.save(policy, state_at(1))
    if rank == 0:
        policy.may_write.set()
    total = torch.ones(1)
    dist.all_reduce(total)  # training goes on, with collectives of its own
    early = saved_steps(Path(folder))
    dist.barrier()
    policy.may_write.set()
    checkpoints.wait()
    dist.barrier()
    complete = saved_steps(Path(folder))
    policy.fails = rank == 1
    checkpoints.save(policy, state_at(2))
    try:
        checkpoints.wait()
    except CheckpointError as error:
        said = str(error)
    dist.barrier()
    checkpoints.close()
    os.fsync = fsync
    names = sorted({part for path in flushed for part in path.split("/") if part.startswith("rank-")})
    return {"early": early, "complete": complete, "said": said, "left": saved_steps(Path(folder)), "flushed": names}


def test_a_rank_lost_while_writing_is_not_reported_as_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lose_peer(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    policy, checkpoints = SlowPolicy(), Checkpoints(tmp_path, asynchronous=True)
    monkeypatch.setattr(checkpoints._group, "_group", object())
    monkeypatch.setattr("moe_replay.train.checkpoint.checkpoint.all_gather_json", lose_peer)
    policy.may_write.set()
    checkpoints.save(policy, state_at(1))
    assert checkpoints.settle()
    assert "is incomplete and will be deleted: another rank ended" in caplog.text
    assert "could not be written" not in caplog.text
    assert saved_steps(tmp_path) == []
    with pytest.raises(WriterLostError, match="another rank ended"):
        checkpoints.wait()


@pytest.mark.distributed
def test_a_checkpoint_is_valid_when_all_ranks_have_written_it(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, write_on_ranks, str(tmp_path))):
        assert found["early"] == []
        assert found["complete"] == found["left"] == ["step-00000001"]
        assert "step 2 could not be written" in found["said"]
        assert "OSError: nothing left" in found["said"]
        folders = ["rank-00000", "rank-00001"] if rank == 0 else ["rank-00001"]  # rank 0 flushes lists of names
        own = f"rank-{rank:05d}"
        assert found["flushed"] == sorted({*folders, f"{own}.safetensors"}), "others' files are flushed"
