"""Damaged checkpoints: every kind of damage is found before anything is loaded, and the one before is used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_replay.errors import MoeReplayError
from moe_replay.train.backends.fsdp import FsdpState
from moe_replay.train.checkpoint import manifest
from moe_replay.train.checkpoint.checkpoint import CheckpointError, Checkpoints, TrainerState
from moe_replay.train.setup import launch
from moe_replay.train.setup.sources import SourceError, check_export
from moe_replay.utils.files import sizes
from tests.distributed.harness import run_ranks
from tests.train.policy import SmallPolicy


def state_at(step: int) -> TrainerState:
    return TrainerState(step=step, version=step, data={"epoch": 0, "position": step})


def two_checkpoints(folder: Path) -> dict[int, list]:
    """Checkpoints of steps 1 and 2, and what the policy held at each."""
    policy, checkpoints, contents = SmallPolicy(seed=1), Checkpoints(folder), {}
    for step in (1, 2):
        policy.train(1)
        checkpoints.save(policy, state_at(step))
        contents[step] = policy.everything()
    return contents


def files_of(checkpoint: Path) -> list[str]:
    return sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())


def flip(file: Path, bit: int) -> None:
    with file.open("r+b", buffering=0) as opened:
        place = bit // 8 % file.stat().st_size
        opened.seek(place)
        (value,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([value ^ 1 << bit % 8]))


def zero_page(file: Path) -> None:
    content = bytearray(file.read_bytes())
    start = len(content) // 2
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    file.write_bytes(content)


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flipped bit": lambda file: flip(file, 4 * file.stat().st_size),
    "zeroed page": zero_page,
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file: os.truncate(file, 0),
    "longer": lambda file: os.truncate(file, file.stat().st_size + 1),
    "missing": Path.unlink,
    "a folder": replace_by_folder,
}
FILES = ["policy/model.pt", "policy/optimizer.pt", "rng/rank-00000.safetensors", "trainer.json", "manifest.json"]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_the_one_before_a_damaged_checkpoint_is_used(tmp_path: Path, name: str, damage: str) -> None:
    contents = two_checkpoints(tmp_path)
    assert files_of(tmp_path / "step-00000002") == sorted(FILES)
    DAMAGE[damage](tmp_path / "step-00000002" / name)
    said: list[str] = []
    policy, checkpoints = SmallPolicy(seed=5), Checkpoints(tmp_path)
    assert checkpoints.restore(policy, said.append) == state_at(1)
    assert policy.is_like(contents[1])
    (line,) = said
    assert line.startswith("WARNING: the checkpoint of step 2 is damaged")
    assert Path(name).name in line
    assert "resuming from step 1" in line
    assert (tmp_path / "step-00000002.damaged").is_dir()
    checkpoints.save(policy, state_at(2))  # the damaged one is not in the way
    assert Checkpoints(tmp_path).restore(policy, said.append) == state_at(2)
    assert len(said) == 1


def test_an_older_file_in_place_of_a_newer_one_is_found(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    name = "policy/model.pt"
    shutil.copyfile(tmp_path / "step-00000001" / name, tmp_path / "step-00000002" / name)
    assert Checkpoints(tmp_path).restore(SmallPolicy()) == state_at(1)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000007")
    policy = SmallPolicy(seed=5)
    before = policy.everything()
    with pytest.raises(CheckpointError, match=r"another step: expected a folder named step-00000002, found step-.*7"):
        Checkpoints(tmp_path).restore(policy)
    assert policy.is_like(before)


def test_when_every_checkpoint_is_damaged_the_error_names_each_and_nothing_is_renamed(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    flip(tmp_path / "step-00000001" / "trainer.json", 100)
    os.truncate(tmp_path / "step-00000002" / "rng" / "rank-00000.safetensors", 7)
    for _ in range(2):  # a second start must not begin a new run
        with pytest.raises(CheckpointError) as raised:
            Checkpoints(tmp_path).restore(SmallPolicy())
        assert "step 2: rng/rank-00000.safetensors has another size" in str(raised.value)
        assert "step 1: trainer.json has another content" in str(raised.value)
        assert "\n" not in str(raised.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_second_damaged_checkpoint_of_a_step_gets_a_name_of_its_own(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    policy = SmallPolicy()
    for _ in range(2):
        flip(tmp_path / "step-00000002" / "policy" / "model.pt", 1000)
        checkpoints = Checkpoints(tmp_path)
        checkpoints.restore(policy)
        checkpoints.save(policy, state_at(2))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000001", "step-00000002", "step-00000002.damaged", "step-00000002.damaged-2"]


def test_damage_to_the_export_does_not_matter_for_resuming(tmp_path: Path) -> None:
    policy, like = SmallPolicy(), tmp_path / "like"
    like.mkdir()
    saved = Checkpoints(tmp_path / "run").save(policy, state_at(1), like)
    assert "hf/model.safetensors" in manifest.read(saved)
    flip(saved / "hf" / "model.safetensors", 999)
    assert Checkpoints(tmp_path / "run").restore(policy) == state_at(1)


def test_an_export_is_compared_with_its_digests_before_it_is_trained(tmp_path: Path) -> None:
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text("{}")
    export = Checkpoints(tmp_path / "run").save(SmallPolicy(), state_at(1), like) / "hf"
    check_export(str(export))
    (export / "config.json").write_text('{"changed": "by its user"}')
    check_export(str(export))
    check_export(str(like))
    flip(export / "model.safetensors", 999)
    with pytest.raises(SourceError, match=r"hf is damaged: hf/model\.safetensors has another content than was written"):
        check_export(str(export))


@pytest.mark.parametrize("where", ["over every file", "beside them", "over every file, with digests"])
def test_no_pickle_in_a_checkpoint_is_read(tmp_path: Path, where: str) -> None:
    """A pickle runs the command that it names; the manifest proves that a file is whole, and not who wrote it."""
    policy, ran = SmallPolicy(), tmp_path / "ran"
    pickled = f"cposix\nsystem\n(S'touch {ran}'\ntR.".encode()
    with launch.process_group(torch.device("cpu")):
        saved = FsdpState(policy.model, policy.optimizer)
        policy.stage, policy.load = saved.stage, saved.load  # type: ignore[method-assign, assignment]
        checkpoints = Checkpoints(tmp_path / "checkpoints")
        checkpoints.save(policy, state_at(1))
        folder = checkpoints.path(1)
        states = [path for path in folder.rglob("*.safetensors") if where != "beside them"]
        assert len(states) == (0 if where == "beside them" else 2)
        for path in [*states, folder / "policy/.metadata", folder / ".metadata"]:
            path.write_bytes(pickled)
        if where != "over every file":
            (folder / manifest.FILE).unlink()
            manifest.write(folder, manifest.measure(folder, sizes(folder)))
        with pytest.raises(MoeReplayError, match=r"is damaged|holds pickled files, which are never read"):
            Checkpoints(tmp_path / "checkpoints").restore(policy)
    assert not ran.exists()


# ---- any bit ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    two_checkpoints(folder)
    return folder


@given(file=st.integers(0, len(FILES) - 1), bit=st.integers(0, 2**20))
def test_any_flipped_bit_is_found(whole: Path, file: int, bit: int) -> None:
    path = whole / "step-00000002" / FILES[file]
    flip(path, bit)
    try:
        assert manifest.damage_on_all_ranks(whole / "step-00000002", ignore="hf/")
    finally:
        flip(path, bit)
    assert manifest.damage_on_all_ranks(whole / "step-00000002", ignore="hf/") == ""


@pytest.mark.faults_long
def test_every_seventh_bit_of_a_checkpoint(whole: Path) -> None:
    newest, tried = whole / "step-00000002", 0
    for path in map(newest.joinpath, FILES):
        for bit in range(0, 8 * path.stat().st_size, 7):
            flip(path, bit)
            assert manifest.damage_on_all_ranks(newest, ignore="hf/"), f"bit {bit} of {path.name}"
            flip(path, bit)
            tried += 1
    assert manifest.damage_on_all_ranks(newest, ignore="hf/") == ""
    print(f"\n{tried} flipped bits in {len(FILES)} files of a checkpoint, all found")


# ---- several ranks ---------------------------------------------------------------------------------------------------


class RankPolicy(SmallPolicy):
    """A policy that saves a file for each rank."""

    def save(self, folder: Path) -> None:
        super().save(self._own(folder))

    def load(self, folder: Path) -> None:
        super().load(self._own(folder))

    def _own(self, folder: Path) -> Path:
        own = folder / f"rank-{torch.distributed.get_rank():05d}"
        own.mkdir(exist_ok=True)
        return own


def damage_and_restore(folder: str) -> tuple[bool, list[str]]:
    policy, checkpoints, said = RankPolicy(), Checkpoints(Path(folder)), list[str]()
    for step in (1, 2):
        checkpoints.save(policy, state_at(step))
    if torch.distributed.get_rank() == 0:  # what only rank 1 reads
        flip(Path(folder, "step-00000002", "policy", "rank-00001", "model.pt"), 4000)
    torch.distributed.barrier()
    return Checkpoints(Path(folder)).restore(policy, said.append) == state_at(1), said


@pytest.mark.distributed
def test_all_ranks_pass_over_what_is_damaged_for_one(tmp_path: Path) -> None:
    for fell_back, said in run_ranks(2, damage_and_restore, str(tmp_path)):
        assert fell_back
        assert "policy/rank-00001/model.pt has another content" in said[0]
