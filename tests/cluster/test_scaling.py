"""`moe-replay cluster`: engines join and leave while a run trains."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from moe_replay.cli.main import main
from moe_replay.cluster.capacity import CapacityError
from moe_replay.cluster.control import NoRunError, RunControl
from moe_replay.train.loop import train
from tests.cluster.local_cluster import LIMIT_S, Events, ray_cluster, train_on
from tests.cluster.test_ray_training import numbers
from tests.train.runs import closeness, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.engine]

STEPS, SAMPLES = 5, 16
_SCORED: list[int] = []


def held(completions: list[str], **columns: Any) -> list[float | None]:
    """The reward of tiny runs; the step N waits while there is a file N in the folder $MOE_REPLAY_HELD."""
    if "MOE_REPLAY_HELD" in os.environ:
        _SCORED.append(len(completions))
        file = Path(os.environ["MOE_REPLAY_HELD"], str(-(-sum(_SCORED) // SAMPLES)))
        end = time.monotonic() + LIMIT_S
        while file.exists() and time.monotonic() < end:
            time.sleep(0.05)
    return closeness(completions=completions, **columns)


def config_of(demo_files: Any, output: Path, **overrides: Any) -> Any:
    return tiny_config(
        demo_files.model,
        demo_files.train,
        output,
        steps=STEPS,
        backend={"device": "cpu"},
        reward={"functions": ["tests.cluster.test_scaling:held"], "timeout_s": LIMIT_S},
        replay={"compare_every": 0},
        **overrides,
    )


def samples(run: Path) -> list[dict[str, Any]]:
    """What the metrics say of the samples of each step; last bits of log-probs depend on the engine's batch."""
    kept = ("step", "reward/", "completion/")
    return [{name: value for name, value in line.items() if name.startswith(kept)} for line in numbers(run)]


def test_engines_join_and_leave_between_steps(
    demo_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From one to three and back; every sample counts once, and with its own seed is what it would have been."""
    train(config_of(demo_files, tmp_path / "alone"))
    gates = tmp_path / "gates"
    gates.mkdir()
    for step in (2, 3):
        (gates / str(step)).touch()
    monkeypatch.setenv("MOE_REPLAY_HELD", str(gates))

    def scale(engines: int) -> None:
        main(["cluster", "scale", "--engines", str(engines), "--run", "run", "--wait", str(LIMIT_S)])

    def disturb(events: Events) -> None:
        events.wait_for_step(1)
        with pytest.raises(CapacityError, match="cannot hold 8 more engines"):
            RunControl().scale(9)
        with pytest.raises(NoRunError, match="at least one engine"):
            RunControl().scale(0)
        with pytest.raises(NoRunError, match="expected --run and one of run, found other"):
            RunControl("other")
        scale(3)
        (gates / "2").unlink()
        events.wait_for_step(2)
        events.wait_for("it is sent the weights again", log="rank-0.log")
        main(["cluster", "status"])
        scale(1)
        (gates / "3").unlink()

    with ray_cluster(2) as cluster:
        config = config_of(demo_files, tmp_path / "run", cluster={"engines": 1})
        assert train_on(cluster, config, disturb) == 0
    assert samples(tmp_path / "run") == samples(tmp_path / "alone")
    shown = capsys.readouterr().out
    assert shown.count("run: 3 of 3 engines ready, 0 starting\n  http://") == 2
    assert "run: 1 -> 3 engines, between steps" in shown
    assert "run: 3 -> 1 engines, between steps\n" in shown
    assert "run: 1 of 1 engines ready, 0 starting\n" in shown
    told = (tmp_path / "run/logs/cluster.log").read_text()
    assert told.count(": ready at ") == 3
    assert told.count(" leaves") == 2
