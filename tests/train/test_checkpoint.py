from __future__ import annotations

import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import moe_replay as mr
from moe_replay.megatron.weights.checkpoint import write_folder
from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.checkpoint import checkpoint, manifest, rng
from moe_replay.train.checkpoint.checkpoint import CheckpointError, Checkpoints, TrainerState
from moe_replay.utils.files import sizes
from tests.distributed.harness import run_ranks
from tests.models import tiny_qwen3_moe
from tests.support.policy import save_random_state
from tests.support.weight_sources import IteratorSource
from tests.train.policy import SmallPolicy
from tests.train.runs import tiny_config

SETTINGS = {"model.dtype": "float32", "backend.tensor_parallel": 1, "model.lora_target_modules": ("q_proj",)}


def state_at(step: int) -> TrainerState:
    return TrainerState(step=step, version=step + 7, data={"epoch": 1, "position": step}, counters={"bad": 0.5})


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def in_child(work: Callable[[], None]) -> int:
    """Exit status of a forked process that does this; negative: the signal that killed it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---- going on --------------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_bit_for_bit_the_same(tmp_path: Path) -> None:
    whole = SmallPolicy(seed=1)
    whole.train(3)
    saved_at = Checkpoints(tmp_path, settings=SETTINGS).save(whole, state_at(3))
    expected = whole.train(4)
    drawn = torch.get_rng_state()

    resumed = SmallPolicy(seed=2)
    resumed.train(1)
    state = Checkpoints(tmp_path, settings=SETTINGS).restore(resumed)
    assert state == state_at(3)
    assert resumed.train(4) == expected
    assert resumed.is_like(whole.everything())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert saved_at == tmp_path / "step-00000003"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_generator_of_the_gpu_goes_on_too(tmp_path: Path) -> None:
    policy = SmallPolicy()
    policy.device = torch.device("cuda")
    Checkpoints(tmp_path).save(policy, state_at(1))
    expected = torch.randn(8, device="cuda")
    Checkpoints(tmp_path).restore(policy)
    assert torch.equal(torch.randn(8, device="cuda"), expected)


@pytest.mark.usefixtures("group")
def test_weights_without_moments_are_loaded_for_a_fused_optimizer(tmp_path: Path) -> None:
    """On a GPU its counters of steps are moved there; where no step was saved there are none."""
    pytest.importorskip("transformers")
    tiny_qwen3_moe().save_pretrained(tmp_path)
    config = tiny_config(tmp_path, tmp_path, tmp_path / "run", checkpoint={"optimizer": False})
    policy = FsdpBackend(config, str(tmp_path), torch.device("cpu"))
    (tmp_path / "policy").mkdir()
    policy.stage()(tmp_path / "policy")
    saved = policy.model.model.norm.weight.detach().full_tensor()
    with torch.no_grad():
        policy.model.model.norm.weight.zero_()
    policy.device = torch.device("cuda")
    policy.load(tmp_path / "policy")
    assert torch.equal(policy.model.model.norm.weight.full_tensor(), saved)


def test_without_a_checkpoint_a_run_begins(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "new" / "folder").restore(SmallPolicy()) is None


def test_saving_twice_without_a_step_between_writes_once(tmp_path: Path) -> None:
    policy = SmallPolicy()
    Checkpoints(tmp_path).save(policy, state_at(5))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.restore(policy)
    before = (tmp_path / "step-00000005").stat().st_mtime_ns
    assert checkpoints.save(policy, state_at(5)) == tmp_path / "step-00000005"
    assert (tmp_path / "step-00000005").stat().st_mtime_ns == before
    with pytest.raises(CheckpointError, match="already exists"):
        Checkpoints(tmp_path).save(policy, state_at(5))  # of a run that did not restore it
    assert Checkpoints(tmp_path).restore(policy) == state_at(5)


def test_the_newest_stay(tmp_path: Path) -> None:
    policy, checkpoints = SmallPolicy(), Checkpoints(tmp_path, keep=2)
    for step in (8, 9, 10, 200_000_000):
        checkpoints.save(policy, state_at(step))
    assert checkpoints.steps() == [10, 200_000_000]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-200000000"]


def test_what_is_not_complete_is_not_taken(tmp_path: Path) -> None:
    policy = SmallPolicy()
    Checkpoints(tmp_path).save(policy, state_at(1))
    (tmp_path / "step-00000002" / "policy").mkdir(parents=True)
    (tmp_path / ".step-00000003.partial" / "policy").mkdir(parents=True)
    (tmp_path / "step-3.txt").touch()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [1]
    assert hidden(tmp_path) == []


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_another_kind_of_run_is_refused_by_name(tmp_path: Path) -> None:
    policy = SmallPolicy()
    Checkpoints(tmp_path, settings=SETTINGS).save(policy, state_at(1))
    other = SETTINGS | {"backend.tensor_parallel": 4}
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=r"expected backend.tensor_parallel 4, found backend.tensor_parallel 1\."):
        Checkpoints(tmp_path, settings=other).restore(policy)

    policy.topology = mr.MoeTopology(num_layers=1, moe_layers=(mr.routes.MoeLayer(0, 16, 2),), model_type="small")
    with pytest.raises(CheckpointError, match="top 2 of 16, found routers small 1 in 1 layers, top 2 of 8"):
        Checkpoints(tmp_path, settings=SETTINGS).restore(policy)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("damage", ["policy/optimizer.pt", "rng/rank-00000.safetensors"])
@pytest.mark.parametrize("missing", [True, False])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str, missing: bool) -> None:
    policy = SmallPolicy()
    file = Checkpoints(tmp_path).save(policy, state_at(1)) / damage
    if missing:
        file.unlink()
    else:
        os.truncate(file, 10)
    with pytest.raises(CheckpointError, match=f"damaged.*{damage}"):
        Checkpoints(tmp_path).restore(policy)


def test_a_format_of_the_future_is_refused(tmp_path: Path) -> None:
    policy = SmallPolicy()
    saved = Checkpoints(tmp_path).save(policy, state_at(1))
    file = saved / "trainer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    (saved / manifest.FILE).unlink()
    manifest.write(saved, manifest.measure(saved, sizes(saved)))
    with pytest.raises(CheckpointError, match="expected 3, found 99"):
        Checkpoints(tmp_path).restore(policy)


# ---- killed at any moment --------------------------------------------------------------------------------------------

FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "tests.half_written"}


class HalvesPolicy(SmallPolicy):
    """Writes through Python, whose file operations can be counted, and stops half-way."""

    def save(self, folder: Path) -> None:
        super().save(folder)
        for file in sorted(folder.iterdir()):
            content = file.read_bytes()
            with file.open("wb") as target:
                target.write(content[: len(content) // 2])
                target.flush()
                sys.audit("tests.half_written")
                target.write(content[len(content) // 2 :])


def is_whole(saved: Path) -> bool:
    files = manifest.read(saved)
    manifest.check(saved, files)
    return len(files) == 4


def die_at(number: int) -> None:
    """Kill this process just before its n-th operation on files."""
    count = itertools.count(1)

    def hook(event: str, arguments: tuple) -> None:
        if event in FILE_EVENTS and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.slow
@pytest.mark.whole_runs
def test_a_run_killed_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    policy, began = HalvesPolicy(), tmp_path / "began"
    policy.train(1)
    Checkpoints(began, keep=1).save(policy, state_at(1))
    contents = {1: policy.everything()}
    policy.train(1)
    contents[2] = policy.everything()

    left, leftovers = [], 0
    for number in itertools.count(1):
        folder = tmp_path / f"killed-{number}"
        shutil.copytree(began, folder)

        def save(folder: Path = folder, number: int = number) -> None:
            checkpoints = Checkpoints(folder, keep=1)
            checkpoints.restore(SmallPolicy())
            die_at(number)
            checkpoints.save(policy, state_at(2))

        status = in_child(save)
        leftovers += bool(hidden(folder))
        assert all(map(is_whole, folder.glob("step-*"))), f"killed at operation {number}"
        checkpoints, restored = Checkpoints(folder, keep=1), SmallPolicy(seed=9)
        state = checkpoints.restore(restored)
        assert state in (state_at(1), state_at(2)), f"killed at operation {number}"
        assert restored.is_like(contents[state.step])
        assert hidden(folder) == []
        left.append(state.step)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        if state.step == 1:
            checkpoints.save(policy, state_at(2))  # what was left is not in the way
            assert checkpoints.steps() == [2]
        shutil.rmtree(folder)
    assert left == sorted(left), "once there, the new one stays"
    assert left.count(1) > 10
    assert left.count(2) > 3
    assert leftovers > 10, "the kills came too early or too late to test anything"


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: set[int] = set()
    fsync, publish = os.fsync, checkpoint._publish
    seen = []

    def noting_fsync(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checking_publish(staged: Path, target: Path) -> None:
        paths = [staged, *staged.rglob("*")]
        seen.extend(path.relative_to(staged).as_posix() for path in paths)
        assert {path.stat().st_ino for path in paths} <= flushed
        publish(staged, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(checkpoint, "_publish", checking_publish)
    Checkpoints(tmp_path).save(SmallPolicy(), state_at(1))
    assert {".", "policy/model.pt", "rng/rank-00000.safetensors", "trainer.json"} <= set(seen)
    assert tmp_path.stat().st_ino in flushed


# ---- no room ---------------------------------------------------------------------------------------------------------


class BigPolicy(SmallPolicy):
    """Writes a megabyte, with whatever is given."""

    def __init__(self, write: Callable[[Tensor, Path], None]) -> None:
        super().__init__()
        self._write = write

    def save(self, folder: Path) -> None:
        super().save(folder)
        self._write(torch.ones(2**18), folder / "big")


def with_python(tensor: Tensor, path: Path) -> None:
    path.write_bytes(tensor.numpy().tobytes())


def with_safetensors(tensor: Tensor, path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"big": tensor}, path)


@pytest.mark.parametrize("write", [with_python, with_safetensors, torch.save], ids=lambda write: write.__name__)
def test_a_disk_that_is_full_costs_the_new_checkpoint_only(tmp_path: Path, write: Callable) -> None:
    SmallPolicy.train(policy := BigPolicy(write), 1)
    Checkpoints(tmp_path).save(policy, state_at(1))
    content = policy.everything()

    def save_with_little_room() -> None:
        checkpoints = Checkpoints(tmp_path)
        checkpoints.restore(policy)
        policy.train(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        with pytest.raises(CheckpointError, match=r"step 2 could not be written.*checkpoint of step 1 is kept"):
            checkpoints.save(policy, state_at(2))
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]

    assert in_child(save_with_little_room) == 0
    restored = BigPolicy(write)
    assert Checkpoints(tmp_path).restore(restored) == state_at(1)
    assert restored.is_like(content)


def test_an_interrupted_save_leaves_nothing_and_says_so_itself(tmp_path: Path) -> None:
    def interrupt(tensor: Tensor, path: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).save(BigPolicy(interrupt), state_at(1))
    assert list(tmp_path.iterdir()) == []


def test_room_is_asked_for_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, checkpoints = SmallPolicy(), Checkpoints(tmp_path / "run", keep=2)
    free = shutil.disk_usage(tmp_path).free
    like = tmp_path / "like"
    like.mkdir()
    (like / "model.safetensors").write_bytes(bytes(500))  # in 8 bits: an export has them in the type of the policy
    exported = IteratorSource(lambda: [("model.norm.weight", torch.zeros(500, dtype=torch.bfloat16))])
    monkeypatch.setattr(policy, "weight_source", lambda: exported)
    checkpoints.check_room(policy, like)
    assert hidden(tmp_path / "run") == []

    monkeypatch.setattr(policy, "state_bytes", lambda: free // 2)
    with pytest.raises(CheckpointError, match="not enough disk space for checkpoints"):
        checkpoints.check_room(policy)

    usage = shutil._ntuple_diskusage(total=10_000, used=0, free=3500)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(policy, "state_bytes", lambda: 500)
    checkpoints.check_room(policy)  # 3 x 500
    with pytest.raises(CheckpointError, match="not enough disk space for checkpoints"):
        checkpoints.check_room(policy, like)  # 3 x 1500
    (tmp_path / "run" / "step-00000001").mkdir()
    (tmp_path / "run" / "step-00000001" / "big").write_bytes(bytes(1500))  # will be deleted to make room
    checkpoints.check_room(policy, like)


def test_a_folder_that_cannot_be_written_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="folder cannot be created"):
        Checkpoints(tmp_path / "file" / "checkpoints")
    checkpoints = Checkpoints(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(CheckpointError, match="checkpoints cannot be written"):
        checkpoints.check_room(SmallPolicy())
    with pytest.raises(CheckpointError, match="keep >= 1"):
        Checkpoints(tmp_path, keep=0)


# ---- the export ------------------------------------------------------------------------------------------------------


class ExportedPolicy(SmallPolicy):
    """Hands out the tensors of a checkpoint folder times two, as parts of one piece of memory."""

    def __init__(self, like: Path) -> None:
        super().__init__()
        self._like = like

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        from safetensors.torch import load_file

        tensors = load_file(self._like / "model.safetensors")
        together = torch.cat([tensor.flatten() for tensor in tensors.values()]) * 2
        parts = together.split([tensor.numel() for tensor in tensors.values()])
        for (name, tensor), part in zip(tensors.items(), parts, strict=True):
            yield name, part.view(tensor.shape)


def test_the_export_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tests.models import tiny_qwen3_moe

    model = tiny_qwen3_moe()
    model.save_pretrained(tmp_path / "like")
    saved = Checkpoints(tmp_path / "run").save(ExportedPolicy(tmp_path / "like"), state_at(1), tmp_path / "like")
    exported = AutoModelForCausalLM.from_pretrained(saved / "hf", dtype=torch.float32).state_dict()
    assert exported.keys() == model.state_dict().keys()
    assert all(torch.equal(exported[name], 2 * tensor) for name, tensor in model.state_dict().items())
    shutil.rmtree(saved / "hf")  # a user may want the room
    assert Checkpoints(tmp_path / "run").restore(SmallPolicy()) == state_at(1)


def test_an_export_that_fails_takes_all_tensors_first(tmp_path: Path) -> None:
    from safetensors import SafetensorError

    taken = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for number in range(5):
            taken.append(number)
            if number == 2:
                (tmp_path / "out").rename(tmp_path / "away")
            yield f"t{number}", torch.ones(4)

    (tmp_path / "out").mkdir()
    with pytest.raises(SafetensorError, match="No such file"):
        write_folder(IteratorSource(tensors), tmp_path / "out", tmp_path, file_bytes=16)
    assert taken == [0, 1, 2, 3, 4]


# ---- several ranks ---------------------------------------------------------------------------------------------------


def save_fail_and_restore(folder: str) -> list:
    rank = torch.distributed.get_rank()
    policy, checkpoints = RankPolicy(seed=rank), Checkpoints(Path(folder))
    policy.train(2 + rank)  # generators and weights differ
    checkpoints.save(policy, state_at(1))
    expected = policy.train(2)

    policy.fails = rank == 1
    with pytest.raises(CheckpointError, match=r"step 2 could not .*OSError: nothing left.*step 1 is kept"):
        checkpoints.save(policy, state_at(2))
    torch.distributed.barrier()
    left = sorted(path.name for path in Path(folder).iterdir())

    resumed = RankPolicy(seed=5)
    state = Checkpoints(Path(folder)).restore(resumed)
    return [state == state_at(1), resumed.train(2) == expected, left]


class RankPolicy(SmallPolicy):
    """A policy whose ranks hold different weights."""

    fails = False

    def _own(self, folder: Path) -> Path:
        own = folder / str(torch.distributed.get_rank())
        own.mkdir(exist_ok=True)
        return own

    def save(self, folder: Path) -> None:
        if self.fails:
            raise OSError("nothing left")
        super().save(self._own(folder))

    def load(self, folder: Path) -> None:
        super().load(self._own(folder))


@pytest.mark.distributed
def test_ranks_save_and_fail_together(tmp_path: Path) -> None:
    for same_state, same_losses, left in run_ranks(2, save_fail_and_restore, str(tmp_path)):
        assert same_state
        assert same_losses
        assert left == ["step-00000001"]


def draw_after_loading(folder: str) -> list[float]:
    rng.load(Path(folder), torch.device("cpu"))
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def save_and_draw(folder: str) -> list[float]:
    rng.seed(torch.distributed.get_rank())
    save_random_state(Path(folder), torch.device("cpu"))
    torch.distributed.barrier()
    return draw_after_loading(folder)


@pytest.mark.distributed
def test_more_ranks_or_fewer_have_random_numbers_of_their_own(tmp_path: Path) -> None:
    saved = run_ranks(2, save_and_draw, str(tmp_path))
    assert run_ranks(1, draw_after_loading, str(tmp_path)) == saved[:1]
    of_three = run_ranks(3, draw_after_loading, str(tmp_path))
    assert of_three[:2] == saved
    assert of_three[2] not in saved
    assert run_ranks(3, draw_after_loading, str(tmp_path)) == of_three
